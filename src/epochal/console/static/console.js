// Refreshes a page: fetches it every few seconds and replaces its content if it has changed.
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

function showAge() {
  const seconds = Math.round((Date.now() - lastAt) / 1000);
  pulse.textContent = seconds < 5 ? "live" : `no answer for ${seconds} s`;
  pulse.classList.toggle("late", seconds >= 5);
}

function replaceContent(text) {
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
        replaceContent(await answer.text());
        lastAt = Date.now();
      }
    } catch {
      // The next turn tries again; the age of the page is shown below.
    }
  } else {
    lastAt = Date.now();
  }
  showAge();
  setTimeout(refresh, EVERY_MS);
}

if (main) {
  showAge();
  setTimeout(refresh, EVERY_MS);
}
