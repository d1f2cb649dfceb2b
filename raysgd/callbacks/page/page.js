"use strict";
// Draws the charts of the report with uPlot, from the JSON in the page. Absent values are skipped, null is a gap.
const { run, history, steps, charts } = JSON.parse(document.getElementById("raysgd-run").textContent);
const controls = [...document.querySelectorAll("#view [name]")];
const places = [...document.querySelectorAll("figure")];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const drawable = (value) => (value === undefined || (typeof value === "number" && Math.abs(value) <= 1e100) ? value : null);
const wholeNumbers = Array.from({ length: 40 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3));

function number(value) {
  if (value === null || value === undefined) return "–";
  const [size, rounded] = [Math.abs(value), +value.toPrecision(5)];
  return size >= 1e6 || (size && size < 1e-3) ? rounded.toExponential() : String(rounded);
}

// Exponential moving average, corrected for the bias at the start.
function smoothed(values, weight) {
  let [sum, count] = [0, 0];
  return values.map((value) => {
    if (typeof value !== "number") return value;
    [sum, count] = [weight * sum + value, weight * count + 1];
    return sum / count;
  });
}

// Draws lines of `{name, color, faint, values}` over `xs`.
function draw(place, xs, lines, { label, axis, legend, log = false, hooks = {} }) {
  const look = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: 1 }, ticks: { show: false } };
  return new uPlot({
    width: place.clientWidth - 32, height: 200, padding: [hooks.draw ? 20 : 8, 22, 0, 0],
    cursor: { y: false, sync: { key: label } },
    scales: { x: { time: label === "time" }, y: { distr: log ? 3 : 1 } },
    axes: [
      { ...look, ...axis },
      { ...look, size: 62, values: (_, values) => values.map((value) => (value === null ? "" : number(value))) },
    ],
    series: [
      { label, value: legend },
      ...lines.map(({ name, color, faint, values }) => ({ label: name, value: (_, value) => number(value), stroke: css(color),
        alpha: faint ? 0.3 : 1, width: 2, class: faint ? "faint" : undefined,
        points: { size: 5, fill: css(color), show: !faint && values.filter(Number.isFinite).length <= 40 } })),
    ],
    hooks: { ready: [(chart) => chart.setLegend({ idx: xs.length - 1 })], ...hooks },
  }, [xs, ...lines.map((line) => line.values)], place);
}

// Returns pairs of x and row: epochs, or means over steps. Metrics that only epochs have stand at the epoch's last step.
function placed(over) {
  if (over !== "step") return history.rows.map((row, index) => [row.epoch ?? index + 1, row]);
  const [rows, known] = [new Map(steps.map((row) => [row.step, row])), new Set(steps.flatMap(Object.keys))];
  let step = 0;
  for (const row of history.rows) {
    step += row.batch_count;
    const others = Object.entries(row).filter(([name]) => !known.has(name));
    if (step >= 0) rows.set(step, { ...rows.get(step), ...Object.fromEntries(others) });
  }
  return [...rows].sort(([one], [other]) => one - other);
}

function drawMetrics(place, names, view) {
  const rows = placed(view.over);
  let xs = rows.map(([x]) => x);
  if (!xs.every((x, index) => Number.isFinite(x) && (!index || x > xs[index - 1]))) xs = rows.map((_, index) => index + 1);
  let lines = names.map((name, index) => ({ name, color: `--c${name.startsWith("val_") ? 1 : index && index + 1}`,
    values: rows.map(([, row]) => drawable(row[name])) }));
  const log = view.axis === "log" && lines.some(({ values }) => values.some((value) => value > 0));
  if (log) lines.forEach((line) => { line.values = line.values.map((value) => (value <= 0 ? null : value)); });
  if (+view.smoothing) lines = lines.flatMap((line) => [{ ...line, faint: true },
    { ...line, values: smoothed(line.values, +view.smoothing) }]);
  return draw(place, xs, lines, { label: view.over || "epoch", axis: { size: 26, incrs: wholeNumbers }, log });
}

// Draws the throughput over time, with a mark for each event of the workers.
function drawTimes(place) {
  const calls = history.records.filter(({ kind, metrics, seconds }) => kind === "train" && metrics.num_samples > 0 && seconds > 0);
  if (calls.length < 2) return place.remove();
  const events = history.events.filter(({ kind }) => kind !== "started" && kind !== "restarted");
  const mark = ({ ctx, bbox, valToPos }) => events.forEach(({ kind, at }, index) => {
    const x = valToPos(at, "x", true);
    ctx.fillStyle = css(["continued", "restored", "lost"].includes(kind) ? "--bad" : "--change");
    ctx.fillRect(x, bbox.top, 1, bbox.height);
    ctx.fillText(index + 1, x, bbox.top - 6);
  });
  const starts = [run.started_at, ...history.events.filter(({ kind }) => kind === "started").map(({ at }) => at)];
  const [ends, values] = [[], []];
  for (const { began_at, seconds, metrics } of calls) {
    const pause = starts.find((at) => at > ends.at(-1) && at <= began_at); // a gap between two programs
    if (pause) {
      ends.push(pause);
      values.push(null);
    }
    ends.push(began_at + seconds);
    values.push(drawable(metrics.num_samples / seconds));
  }
  return draw(place, ends, [{ name: "samples/s", color: "--c0", values }],
    { label: "time", axis: { size: 40 }, legend: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}", hooks: { draw: [mark] } });
}

let drawn = [];
function drawAll() {
  const view = Object.fromEntries(controls.map((each) => [each.name, each.value]));
  drawn.forEach((chart) => chart.destroy());
  drawn = places.map((place, index) => drawMetrics(place, charts[index], view));
  drawn.push(...[...document.querySelectorAll("#times")].map(drawTimes).filter(Boolean));
  return view;
}

// Without counts of steps, there is no choice between epochs and steps.
if (!steps.length && !history.rows.every((row) => row.batch_count)) controls.shift()?.parentElement.remove();
// The address keeps the settings, so that they survive a refresh of the page.
const kept = new URLSearchParams(location.hash.slice(1));
for (const each of controls) {
  each.value = kept.get(each.name) ?? (each.name === "over" && history.rows.length < 2 ? "step" : each.value);
  each.addEventListener("input", () => location.replace(`#${new URLSearchParams(drawAll())}`));
}
addEventListener("resize", () => requestAnimationFrame(drawAll));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
