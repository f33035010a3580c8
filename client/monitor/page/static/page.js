"use strict";
// Keeps the page up to date: the server sends the whole view, and only texts that differ are
// changed. Nothing here makes HTML of a text.

const columns = ["peer", "span", "state", "since", "rtt", "queue", "decode", "prefill",
  "sessions", "kv", "reach", "weights", "device", "software"];
const darkness = matchMedia("(prefers-color-scheme: dark)");
const watchdogSeconds = 40;  // the monitor sends something every 15
let lastAliveAt = Date.now();
let aheadSeconds = Date.now() / 1000 - Number(document.body.dataset.takenAt);
const colours = { none: "#b3261e", one: "#d98200", two: "#4f9d69", more: "#1f6f43" };
const charts = new Map();  // of a section: [depth, durations], and of a run [depth, durations, losses]

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function showAge(element) {
  const at = Number(element.dataset.at);
  if (!element.dataset.at || Number.isNaN(at)) return setText(element, "never");
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - aheadSeconds - at));
  const [number, unit] = seconds < 100 ? [seconds, "s"] : seconds < 6000
    ? [Math.round(seconds / 60), "min"] : seconds < 360000
    ? [Math.round(seconds / 3600), "h"] : [Math.round(seconds / 86400), "days"];
  setText(element, `${number} ${unit} ago`);
  if (element.dateTime) return;
  element.dateTime = new Date(at * 1000).toISOString();
  element.title = new Date(at * 1000).toLocaleString();
}

function setTime(element, at) {
  const text = String(at ?? "");
  if (element.dataset.at !== text) {
    element.dataset.at = text;
    element.removeAttribute("datetime");
  }
  showAge(element);
}

const shownPeers = new WeakMap();  // of a row: the peer that it shows, as JSON

function fillRow(row, peer) {
  const shown = JSON.stringify(peer);
  if (shownPeers.get(row) === shown) return;
  shownPeers.set(row, shown);
  row.className = peer.is_there ? "" : "gone";
  for (const cell of row.cells) {
    const column = cell.dataset.column;
    if (column === "since") setTime(cell.firstElementChild, peer.since);
    else setText(cell, peer[column]);
    if (column === "rtt") cell.title = peer.fault;
  }
}

function makeRow(peer, headings) {
  const row = document.createElement("tr");
  row.dataset.id = peer.id;
  columns.forEach((column, index) => {
    const cell = row.insertCell();
    cell.dataset.column = column;
    cell.dataset.heading = headings[index].textContent;
    if (column === "peer") cell.title = peer.id;
    if (column === "since") cell.append(document.createElement("time"));
  });
  return row;
}

function fillPeers(table, peers) {
  const body = table.tBodies[0];
  const rows = new Map(Array.from(body.rows, (row) => [row.dataset.id, row]));
  peers.forEach((peer, index) => {
    const row = rows.get(peer.id) ?? makeRow(peer, table.tHead.rows[0].cells);
    rows.delete(peer.id);
    fillRow(row, peer);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  for (const row of rows.values()) row.remove();
}

function fillList(list, texts, fill) {
  while (list.children.length > texts.length) list.lastElementChild.remove();
  while (list.children.length < texts.length) list.append(document.createElement("li"));
  texts.forEach((text, index) => fill(list.children[index], text));
}

function fillEvent(item, event) {
  if (!item.firstElementChild) {
    item.replaceChildren(document.createElement("time"), " ", document.createElement("strong"), "");
  }
  setTime(item.firstElementChild, event.at);
  setText(item.querySelector("strong"), event.kind);
  item.lastChild.textContent = ` ${event.text}`;
}

function makeSection(model) {
  const template = document.getElementById("new-model");
  const section = template.content.firstElementChild.cloneNode(true);
  const heading = section.querySelector("h2");
  section.dataset.id = heading.title = model.id;
  heading.id = `name-${model.id}`;
  section.setAttribute("aria-labelledby", heading.id);
  section.querySelector("input[name=model]").value = model.id;
  section.querySelector("input[name=room]").max = model.num_blocks;
  return section;
}

function fillSection(section, model) {
  section.querySelector("h2").firstChild.textContent = `${model.name} `;
  section.querySelector(".scroll").setAttribute("aria-label", `Peers of ${model.name}`);
  const word = section.querySelector("h2 .health");
  word.className = `health ${model.health}`;
  setText(word, model.health);
  const summary = section.querySelector(".summary");
  summary.firstChild.textContent =
    `${model.num_blocks} blocks, serving peers: ${model.num_serving}. Peers read `;
  setTime(summary.querySelector("time"), model.read_at);
  setText(section.querySelector(".progress"), model.progress);
  section.querySelector(".what-if").hidden = Boolean(model.progress);
  section.querySelector("figure.losses").hidden = !model.progress;
  fillList(section.querySelector(".findings"), model.findings, setText);
  fillPeers(section.querySelector("table.peers"), model.peers);
  setText(section.querySelector(".hidden-peers"),
    model.num_hidden ? `${model.num_hidden} more peers are in /state.json.` : "");
}

function fillModels(models) {
  const main = document.getElementById("models");
  const sections = new Map(Array.from(main.children, (section) => [section.dataset.id, section]));
  models.forEach((model, index) => {
    const known = sections.get(model.id);
    const section = known ?? makeSection(model);
    sections.delete(model.id);
    fillSection(section, model);
    if (main.children[index] !== section) main.insertBefore(section, main.children[index] ?? null);
    if (!known) draw(section);
  });
  for (const [id, section] of sections) {
    charts.get(id)?.forEach((chart) => chart.dispose());
    charts.delete(id);
    section.remove();
  }
}

function fillCanary(section, canary) {
  const word = section.querySelector("h2 .health");
  word.className = `health ${canary.health}`;
  setText(word, canary.health);
  setText(section.querySelector(".summary span"), canary.summary);
  setTime(section.querySelector(".summary time"), canary.at);
  fillList(section.querySelector(".findings"), canary.texts, setText);
  section.querySelector(".scroll").hidden = canary.hops.length === 0;
  section.querySelector("tbody").replaceChildren(...canary.hops.map((hop) => {
    const row = document.createElement("tr");
    hop.forEach((text) => { row.insertCell().textContent = text; });
    return row;
  }));
}

function show(view) {
  aheadSeconds = Date.now() / 1000 - view.taken_at;
  document.title = `${view.health}: shoal monitor`;
  const health = document.getElementById("health");
  health.className = `health ${view.health}`;
  setText(health.firstElementChild, view.health);
  setText(document.getElementById("sentence"), view.sentence);
  setText(document.getElementById("error"), view.error);
  setTime(document.querySelector("header time"), view.read_at);
  fillList(document.getElementById("warnings"), view.warnings, setText);
  fillModels(view.models);
  document.querySelectorAll(".canary").forEach((section, index) =>
    fillCanary(section, view.canaries[index]));
  fillList(document.getElementById("event-list"), view.events, fillEvent);
}

// ---- charts

function chooseColour(depth) {
  return depth === 0 ? colours.none : depth === 1 ? colours.one : depth === 2 ? colours.two
    : colours.more;
}

function drawArea(parameters, api) {
  const [left, bottom] = api.coord([api.value(0), api.value(2)]);
  const [right, top] = api.coord([api.value(1), api.value(3)]);
  const depth = api.value(4);
  const shape = { x: left, y: top, width: Math.max(1, right - left), height: bottom - top };
  const hatched = depth === 0 ? "✕" : depth === 1 ? "1" : "";
  return {
    type: "rect", shape, style: { fill: chooseColour(depth) },
    textContent: hatched && shape.width > 12 && shape.height > 10
      ? { type: "text", style: { text: hatched, fill: depth ? "#1c2126" : "#fff", fontSize: 12 } } : undefined,
    textConfig: { position: "inside" },
  };
}

function openChart(element) {
  return echarts.init(element, darkness.matches ? "dark" : null, { renderer: "canvas" });
}

function openCharts(key, section) {
  const made = Array.from(section.querySelectorAll(".chart:not(.losses)"), openChart);
  charts.set(key, made);
  return made;
}

function drawLosses(section, losses, heldOut) {
  const made = charts.get(section.dataset.id);
  made[2] ??= openChart(section.querySelector(".losses .chart"));
  made[2].setOption({
    animation: false, backgroundColor: "transparent", tooltip: { renderMode: "richText" },
    grid: { left: 45, right: 15, top: 30, bottom: 25 }, legend: { top: 0 },
    xAxis: { type: "value", min: "dataMin", minInterval: 1 },
    yAxis: { type: "value", scale: true },
    series: [
      { name: "loss", type: "line", symbolSize: 4, progressive: 0, data: losses },
      { name: "held-out loss", type: "line", symbolSize: 6, progressive: 0, data: heldOut },
    ],
  });
}

async function draw(section) {
  const answer = await fetch(`/model/${section.dataset.id}/history.json`);
  if (!answer.ok) return;
  const history = await answer.json();
  if (!section.isConnected) return;
  const [depth, durations] = charts.get(section.dataset.id) ?? openCharts(section.dataset.id, section);
  const tooltip = { renderMode: "richText" };
  depth.setOption({
    animation: false, backgroundColor: "transparent", tooltip,
    grid: { left: 45, right: 15, top: 10, bottom: 25 },
    xAxis: { type: "time", min: history.since * 1000, max: history.until * 1000,
      axisLabel: { hideOverlap: true } },
    yAxis: { type: "value", min: 0, max: history.num_blocks, inverse: true,
      minInterval: 1 },
    series: [{
      type: "custom", renderItem: drawArea, progressive: 0, clip: true,
      dimensions: ["from", "until", "blocks before", "first block", "replicas"],
      encode: { x: [0, 1], y: [2, 3], tooltip: [3, 2, 4] },
      data: history.areas.map(([start, stop, since, until, replicas]) =>
        [since * 1000, until * 1000, stop, start, replicas]),
    }],
  });
  durations.setOption({
    animation: false, backgroundColor: "transparent", tooltip,
    grid: { left: 45, right: 15, top: 10, bottom: 25 },
    xAxis: { type: "category", data: history.under_replicated.map(([label]) => label) },
    yAxis: { type: "value", minInterval: 1 },
    series: [{ type: "bar", data: history.under_replicated.map(([, count]) => count),
      itemStyle: { color: colours.one } }],
  });
  if (!section.querySelector(".losses").hidden) drawLosses(section, history.losses, history.held_out_losses);
  const rows = section.querySelectorAll("table.durations tr");
  [0, 1].forEach((number) => {
    const cells = history.under_replicated.map((bin) => {
      const cell = document.createElement(number ? "td" : "th");
      cell.textContent = bin[number];
      return cell;
    });
    rows[number].replaceChildren(...cells);
  });
}

async function drawCanary(section, index) {
  const answer = await fetch(`/canary/${index}/history.json`);
  if (!answer.ok) return;
  const history = await answer.json();
  const [chart] = charts.get(index) ?? openCharts(index, section);
  const line = (name, column, axis) => ({
    name, type: "line", yAxisIndex: axis, symbolSize: 4, progressive: 0,
    data: history.runs.map((run) => [run[0] * 1000, run[column]]),
  });
  chart.setOption({
    animation: false, backgroundColor: "transparent", tooltip: { renderMode: "richText" },
    legend: { top: 0 }, grid: { left: 45, right: 45, top: 30, bottom: 25 },
    xAxis: { type: "time", min: history.since * 1000, max: history.until * 1000,
      axisLabel: { hideOverlap: true } },
    yAxis: [{ type: "value", name: "s" }, { type: "value", name: "tokens/s" }],
    series: [line("first token", 1, 0), line("tokens/s", 2, 1)],
  });
}

function drawAll() {
  document.querySelectorAll(".canary").forEach(drawCanary);
  document.querySelectorAll(".model").forEach(draw);
}

// ---- updates

let source = null;
function connect() {
  source?.close();
  source = new EventSource("/events");
  for (const kind of ["view", "history", "alive"]) {
    source.addEventListener(kind, () => {
      lastAliveAt = Date.now();
      document.getElementById("connection").hidden = true;
    });
  }
  source.addEventListener("view", (event) => show(JSON.parse(event.data)));
  source.addEventListener("history", drawAll);
  source.onerror = () => { document.getElementById("connection").hidden = false; };
}

function watch() {
  document.querySelectorAll("time").forEach(showAge);
  if (document.hidden || Date.now() - lastAliveAt < 1000 * watchdogSeconds) return;
  document.getElementById("connection").hidden = false;
  lastAliveAt = Date.now();
  connect();
}

addEventListener("resize", () => charts.forEach((made) => made.forEach((one) => one.resize())));
darkness.addEventListener("change", () => {  // as many systems do in the evening
  charts.forEach((made) => made.forEach((one) => one.dispose()));
  charts.clear();
  drawAll();
});
// A page in the background takes none of the browser's few connections to the monitor.
document.addEventListener("visibilitychange", () => {
  source?.close();
  lastAliveAt = Date.now();
  if (!document.hidden) connect();
});
setInterval(watch, 1000);
document.querySelectorAll("time").forEach(showAge);
drawAll();
setInterval(drawAll, 60000);
connect();
