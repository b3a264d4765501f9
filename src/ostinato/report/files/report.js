// A run report. The script before this one, in the same element, has what the dashboard uses too.

const data = JSON.parse(byId("data").textContent);
const pictures = new Map(data.pictures.graphs.map((each) => [each.name, each]));
const graphs = data.graphs.map((each) => ({
  ...each,
  padding_fraction: each.replays ? each.padding_tokens / (each.replays * each.num_tokens) : 0,
  step_s: each.timed_runs ? each.run_s / each.timed_runs : null,
  num_nodes: pictures.get(each.name)?.num_nodes ?? null,
}));

// --- in short -----------------------------------------------------------------------------------

function showTiles() {
  const replays = graphs.reduce((sum, each) => sum + each.replays, 0);
  const eager = data.eager.reduce((sum, each) => sum + each.steps, 0);
  const rows = data.replayed_tokens + data.padding_tokens;
  const used = graphs.filter((each) => each.replays).length;
  show("replayed", replays + eager ? percent(replays / (replays + eager)) : "–");
  show("replayed-fine", replays + eager ? `${count(replays)} of ${plural(replays + eager, "step")}` : "no step");
  show("padding", rows ? percent(data.padding_tokens / rows) : "–");
  show("padding-fine", rows ? `${count(data.padding_tokens)} of ${count(rows)} tokens` : "no replay");
  show("captured", count(data.plan.num_graphs));
  show("captured-fine", `${plural(graphs.length, "key")}, ${count(used)} used, in ${seconds(data.plan.capture_s)}`);
  show("memory", bytes(data.graph_bytes));
  show("memory-fine", "shared by all of them");
  show("compared", data.num_compared ? plural(data.num_compared, "time") : "–");
  show("compared-fine", data.num_compared ? plural(data.mismatches.length, "mismatch").replace("mismatchs", "mismatches") : "verify is off");
  byId("mismatches").hidden = !data.mismatches.length;
  byId("mismatch-list").replaceChildren(...data.mismatches.map((text) => node("li", { text })));
}

// --- graphs -------------------------------------------------------------------------------------

function keyCell(graph) {
  if (!pictures.has(graph.name)) return node("th", { scope: "row", text: describe(graph) });
  const button = node("button", { type: "button", text: describe(graph), "aria-current": String(byId("which").value === graph.name) });
  button.addEventListener("click", () => {
    choose(graph.name);
    byId("picture-card").scrollIntoView({ block: "start" });
  });
  return node("th", { scope: "row" }, button);
}

function byteCell(graph) {
  const parts = Object.entries(graph.bytes_by_kind).map(([kind, value]) => `${kind}: ${bytes(value)}`);
  const cell = node("td", { text: bytes(graph.num_bytes), className: "number" });
  if (parts.length) cell.title = parts.join("\n");
  return cell;
}

// Sizes differ by hundredths of a millisecond.
const perStep = (value) => (value < 10 ? `${value.toFixed(2)} ms` : milliseconds(value));

function showGraphs() {
  show("graphs-count", `${count(graphs.length)}, ${bytes(data.graph_bytes)}`);
  const most = Math.max(0, ...graphs.map((each) => each.replays));
  const rows = sorted(graphs).map((each) => {
    if (each.error) return row([keyCell(each), { text: each.error, className: "failed", colspan: 7 }, { text: each.mode }]);
    return row([
      keyCell(each),
      node("td", { className: "number" }, count(each.replays), bar(each.replays, most, "share of the most used graph")),
      { text: each.replays ? percent(each.padding_fraction) : "–", className: each.padding_fraction > 0.3 ? "number wasteful" : "number" },
      { text: each.step_s === null ? "–" : perStep(1000 * each.step_s), className: "number" },
      { text: each.timed_runs ? milliseconds(1000 * each.run_s) : "–", className: "number" },
      byteCell(each),
      { text: each.num_nodes === null ? "–" : count(each.num_nodes), className: "number" },
      { text: milliseconds(1000 * each.capture_s), className: "number" },
      { text: each.mode },
    ], each.replays ? "" : "unused");
  });
  byId("graphs").tBodies[0].replaceChildren(...(rows.length ? rows : [row([{ text: "There are no graphs: every step runs eagerly.", className: "empty", colspan: 9 }])]));
}

function showSizes() {
  const used = graphs.filter((each) => each.replays).map((each) => ({ ...each, rows: each.replays * each.num_tokens }));
  const most = Math.max(1, ...used.map((each) => each.rows));
  const items = used.sort((a, b) => a.num_tokens - b.num_tokens).map((each) => {
    const real = node("span"), padding = node("span", { className: "pad" });
    real.style.width = `${(100 * (each.rows - each.padding_tokens)) / most}%`;
    padding.style.width = `${(100 * each.padding_tokens) / most}%`;
    return node("li", {},
      node("span", { text: describe(each) }),
      node("span", { className: "track" }, real, padding),
      node("span", { className: "fine", text: `${count(each.rows - each.padding_tokens)} + ${count(each.padding_tokens)}` }));
  });
  byId("sizes").replaceChildren(...(items.length ? items : [node("li", { className: "fine", text: "No graph was replayed." })]));
}

// --- memory over time ---------------------------------------------------------------------------

function showMemory() {
  const { at_s: at, kv_blocks: blocks, graph_bytes: ofGraphs, free_bytes: free } = data.memory;
  byId("over-time").hidden = at.length < 2;
  if (at.length < 2) return;
  const span = at.at(-1) - at[0] || 1;
  const across = at.map((each) => (each - at[0]) / span);
  const total = data.plan.num_kv_blocks;
  show("chart-kv-peak", `up to ${count(draw("chart-kv", across, [{ values: blocks, className: "" }]))} (${count(total)} per replica)`);
  show("chart-graphs-peak", `up to ${bytes(draw("chart-graphs", across, [{ values: ofGraphs, className: "" }]))}`);
  const known = free.filter((each) => each !== null);
  if (known.length === free.length) {
    draw("chart-free", across, [{ values: free, className: "" }]);
    show("chart-free-peak", `${bytes(Math.min(...known))} to ${bytes(Math.max(...known))}`);
  } else {
    show("chart-free-peak", "unknown");
  }
  show("over-time-fine", `${plural(at.length, "sample")} from ${seconds(at[0])} to ${seconds(at.at(-1))} after the start; charts begin at zero.`);
}

// --- the picture --------------------------------------------------------------------------------

const BOX = 26, GAP = 16, PADDING = 12, CHARACTER = 7, LONGEST = 34;
const ROLES = { gemm: "GEMM", attention: "attention", norm: "norm", sampling: "sampling", copy: "copies, inputs and state", other: "other" };

const shorten = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

// Places boxes in rows; returns them with the height of all.
function place(labels, width) {
  let x = PADDING, y = 34;
  const boxes = labels.map((label) => {
    const wide = Math.min(Math.ceil(label.length * CHARACTER) + 18, width - 2 * PADDING);
    if (x > PADDING && x + wide > width - PADDING) { x = PADDING; y += BOX + GAP; }
    const box = { x, y, wide, label };
    x += wide + GAP;
    return box;
  });
  return { boxes, height: y + BOX + PADDING };
}

function edges(boxes) {
  return boxes.slice(1).map((to, index) => {
    const from = boxes[index], middle = BOX / 2;
    const d = from.y === to.y
      ? `M${from.x + from.wide} ${from.y + middle}H${to.x}`
      : `M${from.x + from.wide} ${from.y + middle}h5V${from.y + BOX + GAP / 2}H${to.x - 6}V${to.y + middle}h6`;
    return shape("path", { class: "edge", d });
  });
}

function drawNode(found, box) {
  const group = shape("g", { class: `node ${found.role}`, transform: `translate(${box.x} ${box.y})` },
    shape("rect", { width: box.wide, height: BOX, rx: 6 }),
    shape("text", { x: box.wide / 2, y: 17, "text-anchor": "middle" }, box.label),
    shape("title", {}, [found.name, ...found.owners].join("\n")));
  group.addEventListener("click", () => {
    for (const each of byId("picture").querySelectorAll(".chosen")) each.classList.remove("chosen");
    group.classList.add("chosen");
    showNode(found);
  });
  return group;
}

function drawGroup(group, width, top) {
  const found = group.nodes.map((number) => data.pictures.nodes[number]);
  const { boxes, height } = place(found.map((each) => shorten(each.label)), width - 16);
  const repeat = group.repeat > 1 ? `  × ${count(group.repeat)}` : "";
  const drawn = shape("g", { transform: `translate(8 ${top})` },
    shape("rect", { class: "band", width: width - 16, height, rx: 8 }),
    shape("text", { class: "name", x: PADDING, y: 21 }, group.title,
      shape("tspan", { class: "soft", "font-weight": 400 }, `  ${plural(found.length, "node")}${repeat}`)),
    ...edges(boxes),
    ...boxes.map((box, index) => drawNode(found[index], box)));
  return { drawn, height };
}

let shownWidth = 0;

function showPicture() {
  const picture = pictures.get(byId("which").value);
  if (!picture) return;
  const width = shownWidth = Math.max(260, byId("picture").clientWidth);
  const parts = [];
  let top = 8;
  picture.groups.forEach((group, index) => {
    if (index) {
      const text = picture.is_split ? "eager break" : "";
      parts.push(shape("path", { class: picture.is_split ? "break" : "edge", d: `M24 ${top}v20` }));
      if (text) parts.push(shape("text", { class: "soft", x: 34, y: top + 15 }, text));
      top += 20;
    }
    const { drawn, height } = drawGroup(group, width, top);
    parts.push(drawn);
    top += height;
  });
  const image = shape("svg", { width, height: top + 8, role: "img", "aria-label": `The nodes of ${picture.name}, by group` }, ...parts);
  byId("picture").replaceChildren(image);
  show("picture-fine", `${plural(picture.num_nodes, "node")}${picture.is_split ? ", in pieces around eager breaks" : ""}`);
}

function showNode(found) {
  const entries = [["Node", found.name], ["Kind", found.kind]];
  if (found.operator) entries.push(["Put there by", found.operator]);
  entries.push(["Holds", found.owners.join(", ") || "memory of the pool only"]);
  byId("node").replaceChildren(...terms(entries));
}

function showKernels() {
  const totals = new Map();
  for (const group of pictures.get(byId("which").value)?.groups ?? []) {
    for (const number of group.nodes) {
      const { name, operator } = data.pictures.nodes[number];
      const key = JSON.stringify([name, operator]);
      totals.set(key, (totals.get(key) ?? 0) + group.repeat);
    }
  }
  const rows = [...totals].sort((a, b) => b[1] - a[1]).map(([key, number]) => {
    const [name, operator] = JSON.parse(key);
    return row([{ text: name }, { text: operator ?? "–" }, { text: count(number), className: "number" }]);
  });
  byId("kernels").tBodies[0].replaceChildren(...rows);
}

function choose(name) {
  byId("which").value = name;
  byId("node").replaceChildren(...terms([["Node", "Choose one in the picture."]]));
  showPicture();
  showKernels();
  showGraphs();
}

function startPicture() {
  byId("picture-card").hidden = !pictures.size;
  if (!pictures.size) return;
  const select = byId("which");
  select.replaceChildren(...[...pictures.keys()].map((name) => node("option", { text: name, value: name })));
  byId("legend").replaceChildren(...Object.entries(ROLES).map(([role, text]) => node("span", { text, className: role })));
  select.addEventListener("change", () => choose(select.value));
  new ResizeObserver(() => { if (Math.abs(byId("picture").clientWidth - shownWidth) > 2) showPicture(); }).observe(byId("picture"));
  const used = [...graphs].sort((a, b) => b.replays - a.replays).find((each) => pictures.has(each.name));
  choose(used ? used.name : pictures.keys().next().value);
}

const sorted = sortable(byId("graphs"), showGraphs);
show("model", `${data.model} · ${data.plan.mode} · ${data.created.replace("T", " ").replace("+00:00", " UTC")}`);
showTiles();
showGraphs();
showSizes();
showEager(data.eager);
showMemory();
startPicture();
showPlan(data.plan, data.graph_bytes, []);
byId("environment").replaceChildren(...terms(Object.entries(data.environment)));
