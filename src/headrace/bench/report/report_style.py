"""The report's style sheet: light, dark and printed pages, and the colours that the plots refer to."""

STYLE = """
:root {
  --page: #ffffff; --ink: #1b1f24; --soft: #5b6470; --faint: #8b949e; --grid: #e3e7eb; --card: #f5f7f9;
  --bad: #b42318; --bad-card: #fdecea; --care: #8a5a00; --care-card: #fdf4e0; --sim: #5b3fa8; --sim-card: #f0ebfb;
  --s1: #2563c9; --s2: #d4571e; --s3: #15835f; --s4: #8445bd; --s5: #a97900; --s6: #c22d5d; --s7: #2f7f95;
  --s8: #676d75;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e8ebee; --soft: #a5adb7; --faint: #7d8792; --grid: #2b3138; --card: #1d2126;
    --bad: #ff8a80; --bad-card: #3a1b19; --care: #f0c05a; --care-card: #332914; --sim: #c3b0f5;
    --sim-card: #2a2340; --s1: #74a9ff; --s2: #ff9a63; --s3: #4dcfa2; --s4: #c79bf2; --s5: #e4bb4a;
    --s6: #ff84a8; --s7: #79c7dc; --s8: #b3b9c1;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  -webkit-print-color-adjust: exact; print-color-adjust: exact;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 22px; margin: 0; }
h2 { font-size: 18px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--grid); }
h3 { font-size: 15px; margin: 22px 0 6px; }
.subject { margin: 2px 0 18px; color: var(--soft); overflow-wrap: anywhere; }
.banner { border-left: 5px solid; border-radius: 4px; padding: 10px 16px; margin: 12px 0; }
.banner ul { margin: 4px 0 0; padding-left: 20px; }
.banner.bad { border-color: var(--bad); background: var(--bad-card); }
.banner.bad strong { color: var(--bad); font-size: 17px; }
.banner.care { border-color: var(--care); background: var(--care-card); }
.banner.care strong { color: var(--care); }
.banner.simulated { border-color: var(--sim); background: var(--sim-card); }
.banner.simulated strong { color: var(--sim); font-size: 17px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 18px 0; }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; padding: 10px 14px; }
.tile span, .tile small { display: block; color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; }
.legend { margin: 6px 0; color: var(--soft); font-size: 14px; }
.legend span { margin-right: 20px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; }
figure { margin: 10px 0 18px; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
figcaption, .note { color: var(--soft); font-size: 13px; margin-top: 4px; }
.finding { font-size: 17px; }
.scroll { overflow-x: auto; margin: 8px 0 14px; }
table { border-collapse: collapse; min-width: min(100%, 620px); font-size: 13.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: 4px 0; }
th { text-align: left; font-weight: 600; color: var(--soft); vertical-align: bottom; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td { overflow-wrap: break-word; max-width: 46ch; }
th.n, td.n { text-align: right; padding: 5px 0 5px 12px; white-space: nowrap; overflow-wrap: normal; }
td small { display: block; color: var(--soft); font-size: 11.5px; }
b.bad { color: var(--bad); }
pre { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; padding: 12px; }
pre { overflow-x: auto; font-size: 12.5px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 14px; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--soft); }
@media (max-width: 640px) { dl { display: block; } dd { margin-bottom: 8px; } main { padding: 18px 14px; } }
@media print {
  :root {
    --page: #ffffff; --ink: #000000; --soft: #333333; --faint: #777777; --grid: #dddddd; --card: #ffffff;
    --bad: #a01810; --bad-card: #ffffff; --care: #6b4600; --care-card: #ffffff; --sim: #4a3290;
    --sim-card: #ffffff; --s1: #2563c9; --s2: #d4571e; --s3: #15835f; --s4: #8445bd; --s5: #a97900;
    --s6: #c22d5d; --s7: #2f7f95; --s8: #676d75;
  }
  main { max-width: none; padding: 0; }
  figure, tr, .tile, .banner { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 8.5px; }
  td small { font-size: 7.5px; }
  th, td { padding: 3px 6px 3px 0; }
  th.n, td.n { padding: 3px 0 3px 6px; }
  .tiles { grid-template-columns: repeat(6, 1fr); gap: 6px; }
  .tile { padding: 6px 8px; }
  .tile b { font-size: 16px; }
  .tile span, .tile small { font-size: 10px; }
}
"""
