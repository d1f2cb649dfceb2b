"use strict";
// Draws the charts of the report with uPlot, from the JSON in the page. Absent values are skipped, null is a gap.
const { history } = JSON.parse(document.getElementById("raysgd-run").textContent);
const controls = [...document.querySelectorAll("#view [name]")];
const whole = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((power) => [power, 2 * power, 5 * power]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const drawable = (value) => (value === undefined || (typeof value === "number" && Math.abs(value) <= 1e100) ? value : null);

function number(value) {
  if (value === null || value === undefined) return "–";
  const [size, rounded] = [Math.abs(value), +value.toPrecision(5)];
  return size >= 1e6 || (size && size < 1e-3) ? rounded.toExponential() : String(rounded);
}

// An exponential mean without the bias of its start.
function smoothed(values, weight) {
  let [sum, count] = [0, 0];
  return values.map((value) => {
    if (typeof value !== "number") return value;
    [sum, count] = [weight * sum + value, weight * count + 1];
    return sum / count;
  });
}

// Draws lines of `{name, color, faint, values}` over `xs`, and marks of `{at, color, text}`.
function draw(place, xs, lines, { label, shown, ticks, height = 220, log = false, marks = [] }) {
  const look = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: 1 }, ticks: { show: false },
    font: "11px system-ui", labelFont: "11px system-ui" };
  const drawMarks = ({ ctx, bbox, valToPos }) => marks.forEach(({ at, color, text }) => {
    const x = valToPos(at, "x", true);
    ctx.strokeStyle = ctx.fillStyle = css(color);
    ctx.beginPath();
    ctx.setLineDash([4, 4]);
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(text, x, bbox.top - 6);
  });
  return new uPlot({
    width: place.clientWidth, height, padding: [marks.length ? 20 : 8, 14, 0, 0],
    cursor: { y: false, sync: { key: label } },
    scales: { x: { time: label === "time" }, y: { distr: log ? 3 : 1 } },
    axes: [
      { ...look, label, labelSize: 18, space: 70, ...ticks },
      { ...look, values: (_, values) => values.map((value) => (value === null ? "" : number(value))),
        size: (_, texts) => 14 + 6.5 * Math.max(1, ...(texts || []).map((text) => text.length)) },
    ],
    series: [
      { label, value: (_, x) => (x === null ? "–" : shown(x)) },
      ...lines.map(({ name, color, faint }) => ({ label: name, value: (_, value) => number(value),
        stroke: css(color) + (faint ? "50" : ""), width: faint ? 1 : 2, class: faint ? "faint" : undefined,
        points: { size: 5, fill: css(color), ...(faint && { show: false }) } })),
    ],
    hooks: { draw: [drawMarks] },
  }, [xs, ...lines.map((line) => line.values)], place);
}

function drawMetrics(place, view) {
  const rows = history.rows;
  let step = 0;
  let xs = rows.map((row, index) => (view.over === "step" ? (step += row.batch_count) : row.epoch ?? index + 1));
  if (!xs.every((x, index) => Number.isFinite(x) && (!index || x > xs[index - 1]))) xs = rows.map((_, index) => index + 1);
  let lines = JSON.parse(place.dataset.lines).map(([name, color]) => ({ name, color: `--c${color}`,
    values: rows.map((row) => drawable(row[name])) }));
  const log = view.log && lines.some(({ values }) => values.some((value) => value > 0));
  if (log) lines.forEach((line) => { line.values = line.values.map((value) => (value <= 0 ? null : value)); });
  if (+view.smooth) lines = lines.flatMap((line) => [{ ...line, faint: true },
    { ...line, values: smoothed(line.values, +view.smooth) }]);
  const ticks = { size: 24, incrs: whole, values: (_, values) => values.map(String) };
  return draw(place, xs, lines, { label: view.over || "epoch", shown: String, ticks, log });
}

// The throughput over time; what happened to the workers is marked.
function drawTimes(place) {
  const calls = history.records.filter(({ kind, metrics, seconds }) => kind === "train" && metrics.num_samples > 0 && seconds > 0);
  if (calls.length < 2) return place.parentElement.remove();
  const events = history.events.filter(({ kind }) => kind !== "started" && kind !== "restarted");
  const marks = events.map(({ kind, at }, index) => ({ at, text: String(index + 1),
    color: ["continued", "restored", "lost"].includes(kind) ? "--bad" : "--change" }));
  const values = calls.map((call) => drawable(call.metrics.num_samples / call.seconds));
  const ends = calls.map((call) => call.began_at + call.seconds);
  const shown = (at) => new Date(1000 * at).toLocaleString();
  return draw(place, ends, [{ name: "samples/s", color: "--c0", values }], { label: "time", shown, ticks: { label: null }, height: 200, marks });
}

let charts = [];
function drawAll() {
  const view = Object.fromEntries(controls.map((each) => [each.name, each.type === "checkbox" ? each.checked : each.value]));
  charts.forEach((chart) => chart.destroy());
  charts = [...document.querySelectorAll("[data-lines]")].map((place) => drawMetrics(place, view));
  charts.push(...[...document.querySelectorAll("#times")].map(drawTimes).filter(Boolean));
  try { sessionStorage.raysgd = JSON.stringify(view); } catch { /* the page forgets its settings when it refreshes */ }
}

let kept = {};
try { kept = JSON.parse(sessionStorage.raysgd || "{}"); } catch { /* there are none */ }
for (const each of controls) {
  if (each.name in kept) each[each.type === "checkbox" ? "checked" : "value"] = kept[each.name];
  each.addEventListener("input", drawAll);
}
addEventListener("resize", () => requestAnimationFrame(drawAll));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
