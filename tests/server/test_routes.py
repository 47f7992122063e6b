"""The table of routes: what the key check derives from it cannot contradict it."""

from __future__ import annotations

from collections import Counter

from server.config import ServerConfig
from server.routes import PACED_PATHS, ROUTES, Access, paths


def test_a_path_has_one_access_whatever_the_method() -> None:
    # The key check sees paths only: of two levels on one path the weaker would hold for both.
    levels = Counter(path for access in Access for path in paths(access))
    assert levels == Counter({route.path for route in ROUTES})


def test_what_changes_or_shows_the_state_of_ranks_is_for_operators() -> None:
    for route in ROUTES:
        if route.path.startswith(("/deepinfer/cache", "/deepinfer/scheduling", "/deepinfer/debug", "/hicache", "/reset")):
            assert route.access is Access.OPERATOR, route.path


def test_only_generation_is_paced_and_nothing_open_takes_a_body() -> None:
    assert {"/v1/chat/completions", "/v1/completions"} == PACED_PATHS
    assert {route.method for route in ROUTES if route.access is Access.OPEN} == {"GET"}


def test_faults_and_prompts_are_offered_only_where_the_settings_say_so() -> None:
    def offered(config: ServerConfig) -> set[str]:
        return {route.path for route in ROUTES if route.enabled(config)}

    optional = {"/deepinfer/debug/fault", "/deepinfer/render"}
    assert not optional & offered(ServerConfig())
    assert optional <= offered(ServerConfig(debug_faults=True, render_route=True))
