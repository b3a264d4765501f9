// The dashboard: asks for /dashboard/data once a second and shows it. Everything that comes from
// the server or the model is set as text, never as markup.

import {
  bar, byId, bytes, count, describe, draw, milliseconds, node, percent, row, seconds, show, showEager, showPlan, sortable, total,
} from "./shared.js";

const PERIOD_MS = 1000;
const SHOWN_S = 120; // in the charts
const KEY = "ostinato-api-key";
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

// --- charts -------------------------------------------------------------------------------------

const samples = []; // {at, rate, running, waiting}

// --- what is shown ------------------------------------------------------------------------------

let last = null;

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

function showGraphs({ graphs, stats }) {
  show("graphs-count", `${count(graphs.length)}, ${bytes(stats.graph_bytes)}`);
  const most = Math.max(0, ...graphs.map((each) => each.replays));
  const rows = sorted(graphs).map((each) => {
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

function showPlanNow({ plan, stats, max_model_len: longest, uptime_s: uptime }) {
  const more = [["A request", `at most ${count(longest)} tokens`]];
  if (stats.draft_runs) more.push(["Drafts", `${stats.acceptance_length.toFixed(2)} tokens per request and step`]);
  showPlan(plan, stats.graph_bytes, [...more, ["Running for", seconds(uptime)]]);
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
  const across = samples.map((each) => 1 - (data.clock_s - each.at) / SHOWN_S);
  show("model", `${data.model} · ${data.plan.mode} · version ${data.version}`);
  document.title = `${rate ? `${Math.round(rate)} tokens/s · ` : ""}Ostinato`;
  showTiles(data, rate);
  show("chart-rate-peak", `up to ${count(Math.round(draw("chart-rate", across, [{ values: samples.map((each) => each.rate), className: "" }])))}`);
  const peak = draw("chart-seqs", across, [
    { values: samples.map((each) => each.running), className: "" },
    { values: samples.map((each) => each.waiting), className: "second" },
  ]);
  show("chart-seqs-peak", `up to ${count(peak)}`);
  showFlight(data);
  showGraphs(data);
  showEager(data.eager);
  showPlanNow(data);
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

const sorted = sortable(byId("graphs"), () => { if (last) showGraphs(last); });

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
