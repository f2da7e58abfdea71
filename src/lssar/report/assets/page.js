"use strict";
// Shared by the report and the explorer: unpacking, the charting library, colours of the theme.

function fail(message) {
  const box = document.getElementById("problem");
  box.textContent = message;
  box.hidden = false;
}

async function unpack(id) {
  const raw = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function readJson(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

let libraryPromise = null;
function loadLibrary() {
  libraryPromise ??= unpack("library").then((code) => {
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(code);
    document.head.append(script);
    document.getElementById("library").remove();
  });
  return libraryPromise;
}

// Theme: the system's until the button is pressed; the choice is kept where the browser lets a local file keep things.
const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
function storedTheme() {
  try { return localStorage.getItem("lssar-theme"); } catch { return null; }
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("theme"));
}
setTheme(storedTheme() ?? (systemDark.matches ? "dark" : "light"));
systemDark.addEventListener("change", () => {
  if (!storedTheme()) setTheme(systemDark.matches ? "dark" : "light");
});
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("lssar-theme", theme); } catch { /* the choice lasts until the page is closed */ }
  setTheme(theme);
});

function cssVariable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Layout changes that give a figure the theme's colours.
function themeOf(layout) {
  const ink = cssVariable("--ink"), grid = cssVariable("--grid"), card = cssVariable("--card");
  const change = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink,
    "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": grid, "hoverlabel.font.color": ink,
  };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(key)) {
      change[key + ".gridcolor"] = grid;
      change[key + ".linecolor"] = grid;
      change[key + ".zerolinecolor"] = grid;
    }
  }
  (layout.shapes ?? []).forEach((_, i) => { change[`shapes[${i}].line.color`] = cssVariable("--soft"); });
  return change;
}

function withChanges(layout, changes) {
  const copy = structuredClone(layout);
  for (const [path, value] of Object.entries(changes)) {
    let at = copy;
    const keys = path.replace(/\[(\d+)\]/g, ".$1").split(".");
    for (const key of keys.slice(0, -1)) at = at[key] ??= {};
    at[keys.at(-1)] = value;
  }
  return copy;
}

const chartConfig = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };

function checkBrowser() {
  if (typeof DecompressionStream === "undefined") {
    fail("This page needs a browser of 2023 or later (DecompressionStream is missing).");
    return false;
  }
  return true;
}
