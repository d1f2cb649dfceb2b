"""The style of the HTML report."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--page:#f6f6f4;--card:#fff;--ink:#16181b;--soft:#52565c;--faint:#7d8288;--rule:#e3e4e1;
 --axis:#b9bcb8;--c0:#2a78d6;--c1:#e0662f;--c2:#1a9a6c;--c3:#c08a00;--c4:#d0568a;--c5:#5a49b8;--other:#c9ccc9;
 --bad:#d03b3b;--change:#8a6d00;--good:#16833f}
@media (prefers-color-scheme:dark){:root{--page:#101213;--card:#191c1e;--ink:#f2f3f3;--soft:#c0c4c8;--faint:#8d9399;
 --rule:#2c3033;--axis:#474c50;--c0:#4b97ee;--c1:#ee7d49;--c2:#2cb888;--c3:#d9a520;--c4:#e07aa6;--c5:#9a8df0;
 --other:#4a4f53;--bad:#f0625d;--change:#d9a520;--good:#4fbf7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink)}
body{font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 40px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:4px 14px;margin-bottom:20px}
h1{font-size:24px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:28px 0 10px}
header p{flex-basis:100%;margin:0;color:var(--soft)}
header p.reason{color:var(--ink);overflow-wrap:anywhere}
.state{font-size:12px;font-weight:600;padding:2px 10px;border-radius:99px;border:1px solid currentColor}
.state.running{color:var(--c0)}.state.finished{color:var(--good)}.state.stopped{color:var(--change)}
.state.failed{color:var(--bad)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px 16px;margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 14px;min-width:0}
.tile .name{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.tile .value{font-size:20px;font-weight:600;line-height:1.3;white-space:nowrap}
.tile .below{color:var(--faint);font-size:12px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:12px}
figure.card{padding:12px 14px 8px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;margin-bottom:6px;font-size:13px;overflow-wrap:anywhere}
figcaption b{font-weight:600;margin-right:auto}
.key{display:inline-flex;align-items:center;gap:6px;color:var(--soft);font-size:12px}
.key i,.swatch,.stack i{background:currentColor}
.key i,.swatch{width:10px;height:10px;border-radius:2px;display:inline-block;flex:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 8px 92px}
svg{display:block;width:100%;height:auto;overflow:visible}
.wide{overflow-x:auto}.wide svg{min-width:680px}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--axis);stroke-width:1}
.ink,.name{fill:var(--faint);font-size:11px;font-variant-numeric:tabular-nums}.name{fill:var(--soft);font-size:12px}
.c0,.train{color:var(--c0)}.c1,.validation{color:var(--c1)}.c2,.test{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5,.predict{color:var(--c5)}.bad{color:var(--bad)}.change{color:var(--change)}.other{color:var(--other)}
.line,.level{fill:none;stroke:currentColor;stroke-width:2}.line{stroke-linejoin:round;stroke-linecap:round}
.level{color:var(--c0)}.dot{fill:currentColor;stroke:var(--card);stroke-width:1}rect{fill:currentColor}
.mark line{stroke:currentColor;stroke-width:1;stroke-dasharray:3 3}.mark circle{fill:currentColor}
.mark text{fill:var(--card);font-size:11px;font-weight:600}
.stack{display:flex;height:22px;gap:2px;border-radius:4px;overflow:hidden;margin-bottom:10px}
.stack i{display:block;flex-basis:0;min-width:2px}
table{border-collapse:collapse;font-size:13px}
th,td{padding:4px 16px 4px 0;text-align:left;vertical-align:top}
th{font-weight:500;color:var(--soft)}
.keys td:nth-child(n+2),.numbers td,.numbers th{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.keys .swatch{margin-right:8px}.keys td:first-child{padding-left:18px;text-indent:-18px}
.table{overflow:auto;max-height:420px;padding:6px 16px}
.numbers td,.words td{border-top:1px solid var(--rule)}
.numbers th,.words th{position:sticky;top:-6px;background:var(--card)}
.numbers td:last-child,.numbers th:last-child{padding-right:0}
.words td:nth-child(-n+5){white-space:nowrap}
.words,.numbers{width:100%}.words td:last-child{width:99%;min-width:220px;padding-right:0}
.facts td{overflow-wrap:anywhere}.facts th{white-space:nowrap}
.card + .card{margin-top:12px}.charts .card + .card{margin-top:0}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:0 16px;align-items:start}
.note,.nothing,footer{color:var(--faint);font-size:12px;margin:8px 0 0}
footer{margin-top:32px}
@media (max-width:560px){main{padding:18px 16px 28px}.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media (max-width:560px){.tile .value{font-size:18px;white-space:normal;overflow-wrap:anywhere}.legend{margin-left:0}}
@media print{body{background:#fff}.table{max-height:none}}
"""
