"""The look of the HTML report: one accent, a palette that colour-blind readers can tell apart, light and dark."""

CSS = """
:root{--page:#f6f7f9;--card:#ffffff;--ink:#1b1f24;--quiet:#5d6773;--line:#e3e7ec;--accent:#0b6bcb;--good:#18794e;--bad:#c62a2f;--warn:#96650a;
--warn-back:#fff4d6;--s0:#0b6bcb;--s1:#d9730d;--s2:#18794e;--s3:#8e4ec6;--s4:#c2298a;--s5:#6b7280}
@media(prefers-color-scheme:dark){:root{--page:#111418;--card:#191d23;--ink:#e6e9ee;--quiet:#98a2af;--line:#2a3038;--accent:#6cb2f5;--good:#5bd197;
--bad:#ff8589;--warn:#f0c05a;--warn-back:#33290f;--s0:#6cb2f5;--s1:#f5a864;--s2:#5bd197;--s3:#c49af0;--s4:#f28bc8;--s5:#a3adba}}
*{box-sizing:border-box}
body{margin:0;
background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1200px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:24px;margin:0;letter-spacing:-.01em}
h2{font-size:18px;margin:28px 0 12px;overflow-wrap:anywhere}
h3{font-size:15px;margin:0 0 8px}
article>h2{margin-top:0}
article,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px;margin:20px 0}
section{margin-top:22px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:20px;margin:20px 0}
.figures figure{margin:0;min-width:0}
.figures .wide{grid-column:1/-1}
figure.wide svg{min-width:680px}
figure.wide{overflow-x:auto}
.quiet,figcaption{color:var(--quiet);font-size:13px;margin:6px 0}
.banner{background:var(--warn-back);
color:var(--warn);border:1px solid var(--warn);border-radius:8px;padding:10px 14px;font-weight:600;margin:20px 0}
.trouble{color:var(--bad);margin:6px 0;overflow-wrap:anywhere}
.mark-good,.mark-bad,.mark-warn{font-weight:600;color:var(--good)}
.mark-bad{color:var(--bad)}.mark-warn{color:var(--warn)}
h2 [class^=mark]{font-size:13px;border:1px solid currentColor;border-radius:99px;padding:1px 9px;margin-left:6px;
vertical-align:2px;white-space:nowrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;margin:12px 0 18px}
.tile{border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tile span{display:block;color:var(--quiet);font-size:12px}
.tile strong{display:block;font-size:22px;line-height:1.3;font-variant-numeric:tabular-nums}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:4px 24px;margin:0 0 8px}
dl div{display:flex;gap:8px}
dt{color:var(--quiet);min-width:84px}
dd{margin:0;overflow-wrap:anywhere}
code{font:12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:var(--ink);overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--quiet);font-weight:600}
tbody tr:last-child td{border-bottom:0}
.left{text-align:left}
th:first-child,td:first-child{padding-left:0}
figure h3{margin-bottom:2px}
svg{display:block;width:100%;height:auto;margin-top:8px}
svg text{fill:var(--quiet);font-size:11px}
svg .name,svg .strip{font-size:12px}
svg .strip{fill:var(--ink)}
svg .value{fill:var(--ink)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .axis{stroke:var(--quiet);stroke-width:1}
svg .mark{stroke:var(--bad);stroke-width:1.5;opacity:.7}
svg .stroke{fill:none;stroke-width:2;stroke-linejoin:round}
svg .dashed{stroke-dasharray:5 4}
svg .dot{fill-opacity:.75;stroke:none}
.stroke.s0{stroke:var(--s0)}.stroke.s1{stroke:var(--s1)}.stroke.s2{stroke:var(--s2)}
.stroke.s3{stroke:var(--s3)}.stroke.s4{stroke:var(--s4)}.stroke.s5{stroke:var(--s5)}
.dot.s0,.bar.s0{fill:var(--s0)}.dot.s1,.bar.s1{fill:var(--s1)}.dot.s2,.bar.s2{fill:var(--s2)}.dot.s3,.bar.s3{fill:var(--s3)}
.dot.s4,.bar.s4{fill:var(--s4)}
.dot.s5,.bar.s5{fill:var(--s5)}
svg .cross{stroke:var(--quiet);stroke-width:1;stroke-dasharray:3 3;opacity:0;pointer-events:none}
svg .lit{stroke:var(--ink);stroke-width:1.5;fill-opacity:1}
#tip{position:fixed;z-index:9;opacity:0;pointer-events:none;white-space:pre;background:var(--ink);color:var(--card);
font:12px/1.45 system-ui,sans-serif;padding:6px 9px;border-radius:6px;max-width:min(440px,90vw);overflow:hidden;transition:opacity .08s;
font-variant-numeric:tabular-nums}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;margin:8px 0 0;font-size:12px;color:var(--quiet)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
i.s0{background:var(--s0)}i.s1{background:var(--s1)}i.s2{background:var(--s2)}i.s3{background:var(--s3)}i.s4{background:var(--s4)}i.s5{background:var(--s5)}
details{margin-top:10px}
summary{cursor:pointer;color:var(--accent);font-size:13px}
details[open] summary{margin-bottom:6px}
@media print{body{background:#fff}article,figure{break-inside:avoid}}
""".replace("\n", "")
