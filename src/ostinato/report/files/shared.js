// What the dashboard and run reports have in common: numbers, nodes, charts, tables. In a report
// this file stands before its own script, in one element.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);
export const show = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };

// --- numbers ------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
export const count = (value) => whole.format(value);

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export function milliseconds(value) {
  if (value === undefined || value === null) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
  return value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;
}

export function seconds(value) {
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function percent(value) {
  if (value > 0 && value < 0.001) return "<0.1%";
  return `${(value * 100).toFixed(value > 0 && value < 0.9995 ? 1 : 0)}%`;
}

export function total(counts) {
  return Object.values(counts).reduce((sum, each) => sum + each, 0);
}

// --- building nodes -----------------------------------------------------------------------------

export function node(name, { text, className, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function row(cells, className) {
  const made = node("tr", { className });
  for (const cell of cells) made.append(cell instanceof Node ? cell : node("td", cell));
  return made;
}

export function bar(value, max, label) {
  return node("meter", { min: 0, max: Math.max(max, 1), value, "aria-label": label });
}

// --- charts -------------------------------------------------------------------------------------

export function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Lines of `series`, {values, className}, at `across` (0 to 1); returns the highest value.
export function draw(id, across, series, least = 1) {
  const highest = Math.max(0, ...series.flatMap((each) => each.values));
  const top = Math.max(least, highest);
  const paths = [{ class: "grid", d: "M0 8H600" }];
  const at = across.map((each) => (600 * each).toFixed(1));
  series.forEach(({ values, className }, index) => {
    const d = `M${values.map((value, number) => `${at[number]} ${(116 - 108 * (value / top)).toFixed(1)}`).join("L")}`;
    if (index === 0) paths.push({ class: "area", d: `${d}L${at.at(-1)} 116L${at[0]} 116Z` });
    paths.push({ class: className, d });
  });
  byId(id).replaceChildren(...paths.map((each) => shape("path", each)));
  return highest;
}

// --- graphs, eager steps, plans -----------------------------------------------------------------

export function describe(graph) {
  const parts = [`${graph.kind}, ${plural(graph.num_tokens, "token")}`];
  if (graph.num_reqs !== null && graph.num_reqs !== graph.num_tokens) parts.push(plural(graph.num_reqs, "request"));
  if (graph.num_loras) parts.push(plural(graph.num_loras, "adapter"));
  return parts.join(", ");
}

function compare(order, a, b) {
  const missing = order.down ? -Infinity : Infinity;
  const [x, y] = [a[order.by] ?? missing, b[order.by] ?? missing];
  const ascending = x < y ? -1 : x > y ? 1 : b.num_tokens - a.num_tokens;
  return order.down && x !== y ? -ascending : ascending;
}

// Makes the buttons in the head of a table of graphs sort it; returns what sorts its rows.
export function sortable(table, redraw) {
  let order = { by: "replays", down: true };
  for (const button of table.querySelectorAll("[data-sort]")) {
    const header = button.closest("th");
    if (button.dataset.sort === order.by) header.setAttribute("aria-sort", "descending");
    button.addEventListener("click", () => {
      const by = button.dataset.sort;
      order = { by, down: order.by === by ? !order.down : by !== "idle_s" && by !== "mode" };
      for (const each of table.querySelectorAll("th[aria-sort]")) each.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      redraw();
    });
  }
  return (rows) => [...rows].sort((a, b) => compare(order, a, b));
}

export function showEager(eager) {
  const all = eager.reduce((sum, each) => sum + each.steps, 0);
  show("eager-count", count(all));
  const items = eager.map((each) => node("li", {},
    node("span", { text: each.reason }),
    node("b", { text: count(each.steps) }),
    bar(each.steps, all, `${each.reason}, share of the eager steps`),
    node("span", { text: each.timed_runs ? `${each.explanation}; ${milliseconds(1000 * each.run_s / each.timed_runs)} each` : each.explanation, className: "fine" })));
  byId("eager").replaceChildren(...(items.length ? items : [node("li", {}, node("span", { text: "No step has run eagerly.", className: "fine" }))]));
}

// What is known of a plan, then `more`: pairs of a term and a text.
export function showPlan(plan, graphBytes, more) {
  const mode = plan.requested_mode === plan.mode ? plan.mode : `${plan.mode} (asked for: ${plan.requested_mode})`;
  const entries = [["Mode", mode]];
  if (plan.changed_because) entries.push(["Because", plan.changed_because]);
  if (plan.attention) entries.push(["Attention", plan.attention]);
  entries.push(
    ["Decode sizes", plan.decode_sizes.map(count).join(", ") || "none"],
    ["Mixed sizes", plan.mixed_sizes.map(count).join(", ") || "none"],
    ["Captured", `${count(plan.num_graphs)} graphs in ${seconds(plan.capture_s)}, ${bytes(graphBytes)}`],
    ["A step", `at most ${count(plan.max_num_seqs)} requests, ${count(plan.max_num_batched_tokens)} tokens`],
  );
  if (plan.num_kv_blocks !== null) entries.push(["KV cache", `${count(plan.num_kv_blocks)} blocks of ${plan.block_size} tokens`]);
  byId("plan").replaceChildren(...terms([...entries, ...more]));
}

export function terms(entries) {
  return entries.flatMap(([term, text]) => [node("dt", { text: term }), node("dd", { text })]);
}

