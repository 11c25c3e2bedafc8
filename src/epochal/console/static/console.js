// Keeps a page fresh: fetches it again every few seconds and takes over what has changed.
"use strict";

const EVERY_MS = 2000;
const main = document.querySelector("main[data-live]");
const pulse = document.getElementById("pulse");
let lastText = "";
let lastAt = Date.now();

function isBusy() {
  const focused = document.activeElement;
  return document.hidden || (focused && main.contains(focused) && focused.matches("input"));
}

function tell() {
  const seconds = Math.round((Date.now() - lastAt) / 1000);
  pulse.textContent = seconds < 5 ? "live" : `no answer for ${seconds} s`;
  pulse.classList.toggle("late", seconds >= 5);
}

function take(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  if (!fresh || fresh.innerHTML === lastText) return;
  const focusedHref = main.contains(document.activeElement) && document.activeElement.getAttribute("href");
  const scrolled = [...main.querySelectorAll(".wide")].map((one) => one.scrollLeft);
  lastText = fresh.innerHTML;
  main.replaceChildren(...fresh.childNodes);
  main.querySelectorAll(".wide").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
  if (focusedHref) main.querySelector(`a[href="${CSS.escape(focusedHref)}"]`)?.focus();
}

async function refresh() {
  if (!isBusy()) {
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", redirect: "error" });
      if (answer.ok) {
        take(await answer.text());
        lastAt = Date.now();
      }
    } catch {
      // The next turn tries again; how long it has been is told below.
    }
  } else {
    lastAt = Date.now();
  }
  tell();
  setTimeout(refresh, EVERY_MS);
}

if (main) {
  tell();
  setTimeout(refresh, EVERY_MS);
}
