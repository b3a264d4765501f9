// The dashboard: asks for /dashboard/data once a second and shows it. Everything that comes from
// the server or the model is set as text, never as markup.

const PERIOD_MS = 1000;
const SHOWN_S = 120; // in the charts
const KEY = "ostinato-api-key";
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const show = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };

// --- asking -------------------------------------------------------------------------------------

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

let asking = null; // the promise of a key, while the dialog is open

function askForKey(message) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("ask");
    show("ask-error", message);
    byId("ask-form").addEventListener("submit", () => {
      sessionStorage.setItem(KEY, byId("key").value.trim());
      byId("key").value = "";
      asking = null;
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
  return asking;
}

// A dialog that asks for the key cannot be dismissed: there is nothing to see without it.
byId("ask").addEventListener("cancel", (event) => event.preventDefault());
byId("ask").addEventListener("close", () => { if (asking) byId("ask").showModal(); });

// --- numbers ------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const count = (value) => whole.format(value);

const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function milliseconds(value) {
  if (value === undefined || value === null) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
  return value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;
}

function seconds(value) {
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function percent(value) {
  if (value > 0 && value < 0.001) return "<0.1%";
  return `${(value * 100).toFixed(value > 0 && value < 0.9995 ? 1 : 0)}%`;
}

function total(counts) {
  return Object.values(counts).reduce((sum, each) => sum + each, 0);
}

// --- building nodes -----------------------------------------------------------------------------

function node(name, { text, className, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function row(cells, className) {
  const made = node("tr", { className });
  for (const cell of cells) made.append(cell instanceof Node ? cell : node("td", cell));
  return made;
}

function bar(value, max, label) {
  return node("meter", { min: 0, max: Math.max(max, 1), value, "aria-label": label });
}

// --- charts -------------------------------------------------------------------------------------

const samples = []; // {at, rate, running, waiting}

function line(values, top) {
  const now = samples.at(-1).at;
  const across = samples.map((each) => (600 * (1 - (now - each.at) / SHOWN_S)).toFixed(1));
  const points = values.map((value, index) => `${across[index]} ${(116 - 108 * (value / top)).toFixed(1)}`);
  return { d: `M${points.join("L")}`, start: across[0] };
}

function draw(id, series) {
  const top = Math.max(1, ...series.flatMap((each) => each.values));
  const paths = [{ className: "grid", d: "M0 8H600" }];
  series.forEach(({ values, className }, index) => {
    const { d, start } = line(values, top);
    if (index === 0) paths.push({ className: "area", d: `${d}L600 116L${start} 116Z` });
    paths.push({ className, d });
  });
  byId(id).replaceChildren(...paths.map(({ className, d }) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    path.setAttribute("class", className);
    return path;
  }));
  return Math.max(0, ...series.flatMap((each) => each.values));
}

// --- what is shown ------------------------------------------------------------------------------

let last = null;
let order = { by: "replays", down: true };

function showTiles(data, rate) {
  const { stats, latency, plan } = data;
  const replays = total(stats.replays);
  const eager = total(stats.eager);
  const rows = stats.replayed_tokens + stats.padding_tokens;
  show("rate", rate === null ? "–" : count(Math.round(rate)));
  show("rate-fine", `${count(stats.generation_tokens)} tokens so far`);
  show("ttft", milliseconds(latency.ttft_ms?.p50));
  show("ttft-fine", latency.ttft_ms ? `p90 ${milliseconds(latency.ttft_ms.p90)} · p99 ${milliseconds(latency.ttft_ms.p99)}` : "no request in the last 5 minutes");
  show("tpot", milliseconds(latency.tpot_ms?.p50));
  show("tpot-fine", latency.tpot_ms ? `p90 ${milliseconds(latency.tpot_ms.p90)} · p99 ${milliseconds(latency.tpot_ms.p99)}` : "no request in the last 5 minutes");
  show("replayed", replays + eager ? percent(replays / (replays + eager)) : "–");
  show("replayed-fine", rows ? `${percent(stats.padding_tokens / rows)} padding in them` : "no step yet");
  show("kv", percent(stats.kv_cache_usage));
  const queries = stats.prefix_query_tokens;
  const prefix = queries ? `${percent(stats.prefix_hit_tokens / queries)} prefix hits` : "no prefix looked up";
  const preempted = stats.num_preemptions ? ` · ${count(stats.num_preemptions)} preempted` : "";
  show("kv-fine", plan.num_kv_blocks === null ? "this model has none" : prefix + preempted);
}

function showFlight({ in_flight: requests, stats }) {
  show("flight-count", `${count(stats.num_running)} running, ${count(stats.num_waiting)} waiting`);
  const rows = requests.map((each) => row([
    { text: each.request_id },
    node("td", {}, node("span", { text: each.state, className: `state ${each.state}` })),
    { text: count(each.num_prompt_tokens), className: "number" },
    { text: count(each.num_generated_tokens), className: "number" },
    { text: seconds(each.age_s), className: "number" },
  ]));
  byId("flight").tBodies[0].replaceChildren(...(rows.length ? rows : [row([{ text: "Nothing is running. Send a prompt.", className: "empty", colspan: 5 }])]));
}

function compare(a, b) {
  const missing = order.down ? -Infinity : Infinity;
  const [x, y] = [a[order.by] ?? missing, b[order.by] ?? missing];
  const ascending = x < y ? -1 : x > y ? 1 : b.num_tokens - a.num_tokens;
  return order.down && x !== y ? -ascending : ascending;
}

function describe(graph) {
  const parts = [`${graph.kind}, ${plural(graph.num_tokens, "token")}`];
  if (graph.num_reqs !== null && graph.num_reqs !== graph.num_tokens) parts.push(plural(graph.num_reqs, "request"));
  if (graph.num_loras) parts.push(plural(graph.num_loras, "adapter"));
  return parts.join(", ");
}

function showGraphs({ graphs, stats }) {
  show("graphs-count", `${count(graphs.length)}, ${bytes(stats.graph_bytes)}`);
  const most = Math.max(0, ...graphs.map((each) => each.replays));
  const rows = [...graphs].sort(compare).map((each) => {
    const hits = node("td", { className: "number" }, count(each.replays), bar(each.replays, most, "share of the most used graph"));
    const key = node("th", { scope: "row", text: describe(each) });
    if (each.error) return row([key, { text: each.error, className: "failed", colspan: 4 }, { text: each.mode }]);
    return row([
      key,
      hits,
      { text: each.replays ? percent(each.padding_fraction) : "–", className: each.padding_fraction > 0.3 ? "number wasteful" : "number" },
      { text: bytes(each.num_bytes), className: "number" },
      { text: each.idle_s === null ? "never" : each.idle_s < 1.5 ? "now" : `${seconds(each.idle_s)} ago`, className: "number" },
      { text: each.mode },
    ], each.replays ? "" : "unused");
  });
  byId("graphs").tBodies[0].replaceChildren(...(rows.length ? rows : [row([{ text: "There are no graphs: the mode is NONE, and every step runs eagerly.", className: "empty", colspan: 6 }])]));
}

function showEager({ eager }) {
  const all = eager.reduce((sum, each) => sum + each.steps, 0);
  show("eager-count", count(all));
  const items = eager.map((each) => node("li", {},
    node("span", { text: each.reason }),
    node("b", { text: count(each.steps) }),
    bar(each.steps, all, `${each.reason}, share of the eager steps`),
    node("span", { text: each.explanation, className: "fine" })));
  byId("eager").replaceChildren(...(items.length ? items : [node("li", {}, node("span", { text: "Every step so far ran through a graph.", className: "fine" }))]));
}

function showPlan({ plan, stats, max_model_len: longest, uptime_s: uptime }) {
  const mode = plan.requested_mode === plan.mode ? plan.mode : `${plan.mode} (asked for: ${plan.requested_mode})`;
  const entries = [["Mode", mode]];
  if (plan.changed_because) entries.push(["Because", plan.changed_because]);
  if (plan.attention) entries.push(["Attention", plan.attention]);
  entries.push(
    ["Decode sizes", plan.decode_sizes.map(count).join(", ") || "none"],
    ["Mixed sizes", plan.mixed_sizes.map(count).join(", ") || "none"],
    ["Captured", `${count(plan.num_graphs)} graphs in ${seconds(plan.capture_s)}, ${bytes(stats.graph_bytes)}`],
    ["A step", `at most ${count(plan.max_num_seqs)} requests, ${count(plan.max_num_batched_tokens)} tokens`],
    ["A request", `at most ${count(longest)} tokens`],
  );
  if (plan.num_kv_blocks !== null) entries.push(["KV cache", `${count(plan.num_kv_blocks)} blocks of ${plan.block_size} tokens`]);
  if (stats.draft_runs) entries.push(["Drafts", `${stats.acceptance_length.toFixed(2)} tokens per request and step`]);
  entries.push(["Running for", seconds(uptime)]);
  byId("plan").replaceChildren(...entries.flatMap(([term, text]) => [node("dt", { text: term }), node("dd", { text })]));
}

function showModels({ model, adapters, task }) {
  const select = byId("which");
  const names = [model, ...adapters];
  if (select.options.length !== names.length) {
    select.replaceChildren(...names.map((name) => node("option", { text: name, value: name })));
  }
  document.querySelector(".adapter").hidden = names.length < 2;
  if (task !== "generate" && !byId("send").disabled) {
    byId("send").disabled = true;
    show("answer-fine", `This model was loaded to ${task}; it does not generate text.`);
  }
}

function showAll(data) {
  const elapsed = last ? data.clock_s - last.clock_s : 0;
  const made = last ? data.stats.generation_tokens - last.stats.generation_tokens : 0;
  const rate = elapsed > 0 && made >= 0 ? made / elapsed : null;
  last = data;
  samples.push({ at: data.clock_s, rate: rate ?? 0, running: data.stats.num_running, waiting: data.stats.num_waiting });
  while (data.clock_s - samples[0].at > SHOWN_S) samples.shift();
  show("model", `${data.model} · ${data.plan.mode} · version ${data.version}`);
  document.title = `${rate ? `${Math.round(rate)} tokens/s · ` : ""}Ostinato`;
  showTiles(data, rate);
  show("chart-rate-peak", `up to ${count(Math.round(draw("chart-rate", [{ values: samples.map((each) => each.rate), className: "" }])))}`);
  const peak = draw("chart-seqs", [
    { values: samples.map((each) => each.running), className: "" },
    { values: samples.map((each) => each.waiting), className: "second" },
  ]);
  show("chart-seqs-peak", `up to ${count(peak)}`);
  showFlight(data);
  showGraphs(data);
  showEager(data);
  showPlan(data);
  showModels(data);
}

// --- keeping it live ----------------------------------------------------------------------------

let paused = false;

function setStatus(state, text = state) {
  byId("status").dataset.state = state;
  show("status", text);
}

async function refresh() {
  const response = await fetch("/dashboard/data", { headers: headers(), cache: "no-store" });
  if (response.status === 401) {
    const had = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    setStatus("lost", "needs a key");
    await askForKey(had ? "That key is wrong." : "");
    return refresh();
  }
  if (!response.ok) throw new Error(await errorOf(response));
  showAll(await response.json());
  return setStatus(paused ? "paused" : "live");
}

async function follow() {
  for (;;) {
    if (!paused && !document.hidden) {
      try {
        await refresh();
      } catch (error) {
        setStatus("lost", error instanceof TypeError ? "no connection" : error.message);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  show("pause", paused ? "Resume" : "Pause");
  if (paused) setStatus("paused");
});

for (const button of document.querySelectorAll("#graphs [data-sort]")) {
  const header = button.closest("th");
  if (button.dataset.sort === order.by) header.setAttribute("aria-sort", "descending");
  button.addEventListener("click", () => {
    const by = button.dataset.sort;
    order = { by, down: order.by === by ? !order.down : by !== "idle_s" && by !== "mode" };
    for (const each of document.querySelectorAll("#graphs th[aria-sort]")) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    if (last) showGraphs(last);
  });
}

// --- trying a prompt ----------------------------------------------------------------------------

let running = null; // the AbortController of the request

async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const text = part.replace(/^data: /, "");
      if (text !== "[DONE]") yield JSON.parse(text);
    }
  }
}

function body(prompt) {
  const chats = last?.has_chat_template ?? true;
  return {
    path: chats ? "/v1/chat/completions" : "/v1/completions",
    content: {
      model: byId("which").value || undefined,
      ...(chats ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    },
  };
}

function summary(began, first, usage) {
  const parts = [];
  if (first !== null) parts.push(`first token after ${milliseconds(first - began)}`);
  if (usage) {
    parts.push(`${count(usage.completion_tokens)} tokens`);
    const after = (performance.now() - first) / 1000;
    if (usage.completion_tokens > 1 && after > 0) parts.push(`${count(Math.round((usage.completion_tokens - 1) / after))} tokens/s`);
  }
  return parts.join(" · ");
}

async function send(prompt) {
  const answer = byId("answer");
  answer.textContent = "";
  answer.classList.remove("failed");
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  show("answer-fine", "waiting for the first token…");
  const began = performance.now();
  let first = null;
  let usage = null;
  try {
    const { path, content } = body(prompt);
    const response = await fetch(path, {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(content),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      const text = choice?.text ?? choice?.delta?.content;
      if (!text) continue;
      first ??= performance.now();
      const atEnd = answer.scrollTop + answer.clientHeight >= answer.scrollHeight - 4;
      answer.append(text);
      if (atEnd) answer.scrollTop = answer.scrollHeight;
    }
    show("answer-fine", summary(began, first, usage) || "an empty answer");
  } catch (error) {
    if (error.name === "AbortError") {
      show("answer-fine", "stopped");
    } else {
      answer.classList.add("failed");
      answer.append(error.message);
      show("answer-fine", "failed");
    }
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

byId("try").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const box = byId("prompt");
  send(box.value || box.placeholder);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    byId("try").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

follow();
