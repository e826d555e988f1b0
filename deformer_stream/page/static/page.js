// What the page needs besides htmx: how fresh it is, how long ago something was, and what must survive a replacement.
// Without this script every page still works; it is then as fresh as its last loading.
"use strict";
(() => {
  const HIDDEN_SECONDS = 60;
  const state = document.getElementById("connection-state");
  const lost = document.getElementById("connection-lost");
  const live = document.getElementById("live-updates");
  if (!state || !live) return;

  // The clock of this machine may be wrong, so "12 min ago" follows the server's. A browser's timer stops while the
  // machine sleeps, and the demo's clock may be ahead, so each answer sets it again.
  let serverNow = Number(document.querySelector('meta[name="now"]').content);
  let startedAt = performance.now();
  const now = () => serverNow + performance.now() - startedAt;
  document.addEventListener("htmx:beforeSwap", (event) => {
    const found = /<meta name="now" content="(\d+)">/.exec(event.detail.xhr.responseText);
    if (found) [serverNow, startedAt] = [Number(found[1]), performance.now()];
  });

  function formatDuration(milliseconds) {
    const seconds = Math.round(milliseconds / 1000);
    if (seconds < 60) return `${seconds} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
    const days = Math.floor(hours / 24);
    return hours % 24 && days < 14 ? `${days} d ${hours % 24} h` : `${days} d`;
  }

  function updateTimes() {
    for (const element of document.querySelectorAll("time[data-ago]")) {
      const elapsed = now() - Number(element.dataset.ago);
      const words = Math.abs(elapsed) < 5000 ? "just now"
        : elapsed > 0 ? `${formatDuration(elapsed)} ago` : `in ${formatDuration(-elapsed)}`;
      if (element.textContent !== words) element.textContent = words;
    }
  }
  setInterval(updateTimes, 5000);

  // Whether notices of changes arrive, and whether the server can read its logs
  let connection = state.dataset.state;
  function showConnection() {
    const isOutdated = connection === "live" && document.querySelector("#banners [data-unreadable]");
    state.dataset.state = isOutdated ? "lost" : connection;
    const words = { live: "Live", paused: "Paused", lost: "Not live" }[state.dataset.state];
    const element = state.querySelector(".words");
    if (words && element.textContent !== words) element.textContent = words;
  }
  document.addEventListener("htmx:afterSettle", showConnection);
  function setConnection(name) {
    if (connection === name) return;
    connection = name;
    const time = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
    showConnection();
    lost.hidden = name !== "lost";
    if (name === "lost") lost.textContent = `The connection was lost at ${time}. What is shown may be out of date. It is tried again.`;
  }
  document.addEventListener("htmx:sseOpen", () => setConnection("live"));
  document.addEventListener("htmx:sseError", () => setConnection("lost"));

  // A label that could not be sent
  const textByEvent = {
    "htmx:sendError": "Nothing was stored, because the server cannot be reached. Press the button again.",
    "htmx:timeout": "The server did not answer in time, so it is not known whether this was stored. Load the page again.",
  };
  for (const [name, text] of Object.entries(textByEvent)) {
    document.addEventListener(name, (event) => {
      const form = event.detail.elt && event.detail.elt.closest("form");
      const errors = document.getElementById("errors");
      if (!form || !errors) return;
      const message = document.createElement("p");
      message.className = "error";
      message.setAttribute("role", "alert");
      message.textContent = text;
      errors.replaceChildren(message);
    });
  }
  document.addEventListener("htmx:afterRequest", (event) => {
    const form = event.detail.elt;
    if (form.matches("form[data-clear]") && event.detail.successful) form.reset();
  });

  // What must survive when a part of the page is replaced: opened details, and which incidents were there before
  let openDetails = new Set();
  let knownRows = new Set();
  document.addEventListener("htmx:beforeSwap", () => {
    openDetails = new Set([...document.querySelectorAll("details[open][id]")].map((one) => one.id));
    knownRows = new Set([...document.querySelectorAll(".row[id]")].map((one) => one.id));
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    for (const one of document.querySelectorAll("details[id]")) if (openDetails.has(one.id)) one.open = true;
    if (event.detail.target && event.detail.target.id === "live") {
      for (const row of document.querySelectorAll(".row[id]")) if (!knownRows.has(row.id)) row.classList.add("is-new");
    }
    updateTimes();
  });

  // A browser opens six connections to a server. Hidden tabs give theirs back, except for the list of open incidents,
  // whose title shows their number.
  const markup = live.innerHTML;
  let timer = null;
  function swapLive(content) {
    htmx.swap(live, content, { swapStyle: "innerHTML", swapDelay: 0, settleDelay: 0 });
  }
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (document.hidden && !live.hasAttribute("data-keep")) {
      timer = setTimeout(() => { swapLive(""); setConnection("paused"); }, HIDDEN_SECONDS * 1000);
    } else if (!document.hidden && !live.firstElementChild) {
      swapLive(markup);
      htmx.process(live);
    }
  });
})();
