from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data())
def test_any_cut_of_the_text_gives_what_a_search_of_the_whole_gives(text, stops, data):
    cutter = StopStrings(tuple(stops))
    out, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += cutter.push(rest[:size])
        rest = rest[size:]
    out += cutter.flush()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert out == (text[: min(ends)[1]] if ends else text)
    assert (cutter.matched is not None) == bool(ends)


def test_text_that_cannot_become_a_stop_string_comes_out_at_once():
    cutter = StopStrings(("END",))
    assert cutter.push("abcE") == "abc"
    assert cutter.push("x") == "Ex"
    assert cutter.push("yEN") == "y"
    assert cutter.push("D tail") == ""
    assert cutter.matched == "END"
    assert cutter.push("more") == cutter.flush() == ""


def test_without_stop_strings_nothing_is_held_back():
    assert StopStrings(()).push("abc") == "abc"
    assert StopStrings(("",)).push("abc") == "abc"
