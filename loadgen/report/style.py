"""The style sheet of the page: one column on a phone, several on a desk, light and dark as the reader's system says."""

from __future__ import annotations

# Colours of classes are those of Okabe and Ito, which people with any colour vision tell apart
STYLE = """
:root {
  --paper: #f6f7f9; --card: #ffffff; --ink: #1d2733; --soft: #5c6b7a; --edge: #dfe4ea; --grid: #e8ecf0;
  --warn-paper: #fff4e0; --warn-ink: #7a4b00; --warn-edge: #f0c880;
  --c0: #6b7885; --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #cc79a7; --c5: #b58900;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12171d; --card: #1a2129; --ink: #e4e9ee; --soft: #93a1af; --edge: #2b353f; --grid: #28313a;
    --warn-paper: #33270f; --warn-ink: #ffd58a; --warn-edge: #6b5220;
    --c0: #9aa7b4; --c1: #56b4e9; --c2: #ff8c42; --c3: #2fd0a0; --c4: #e39bc4; --c5: #f0d04a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.1rem; margin: 32px 0 12px; }
h3 { font-size: .95rem; margin: 0 0 6px; }
h3 .soft { font-weight: 400; }
p { margin: 4px 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .875rem; }
.label { display: inline-block; margin: 8px 0 0; padding: 2px 10px; border-radius: 99px; font-weight: 600;
  background: var(--warn-paper); color: var(--warn-ink); border: 1px solid var(--warn-edge); }
.warnings { margin: 16px 0 0; padding: 10px 16px 10px 32px; border-radius: 10px; overflow-wrap: anywhere;
  background: var(--warn-paper); color: var(--warn-ink); border: 1px solid var(--warn-edge); }
.cards { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); margin-top: 20px; }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.grid.tables { grid-template-columns: repeat(auto-fill, minmax(min(500px, 100%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 14px; min-width: 0; }
.card .value { font-size: 1.35rem; font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 6px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--edge); }
th { color: var(--soft); font-weight: 500; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
table.pairs td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
table.pairs td:first-child { color: var(--soft); min-width: 9rem; width: 30%; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .8rem; color: var(--soft); }
.key { display: inline-block; width: 18px; height: 0; margin-right: 5px; vertical-align: middle; border-top: 2px solid; }
.chart { display: block; width: 100%; height: auto; font-size: 11px; }
.grid-line { stroke: var(--grid); stroke-width: 1; }
.tick { fill: var(--soft); } .tick.x { text-anchor: middle; } .tick.y { text-anchor: end; }
.line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.thin { stroke-dasharray: 3 3; border-top-style: dashed; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
"""
NUM_COLORS = 6
