// Keeps a page current: fetches it every few seconds and changes only the nodes that differ, so that
// selected text, focus and scroll positions stay. Adds local times and copy buttons.
"use strict";

const EVERY_MS = 2000;
const LATE_S = 5;
const AGES = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const main = document.querySelector("main");
const isLive = main.hasAttribute("data-live");
const pulse = document.getElementById("pulse");
const signedOut = document.getElementById("signed-out");
let lastAt = Date.now();

function age(seconds) {
  const [unit, span] = AGES.find(([, span]) => seconds >= span) || ["s", 1];
  return `${Math.max(0, Math.floor(seconds / span))} ${unit}`;
}

// Pages show UTC; with scripts, the local time on hover and how long ago it was.
function annotate(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    time.title = at.toLocaleString();
    const ago = document.createElement("span");
    ago.className = "ago";
    ago.textContent = ` (${age((Date.now() - at) / 1000)} ago)`;
    time.append(ago);
  }
  for (const button of root.querySelectorAll("[data-copy]")) button.hidden = false;
}

function isSame(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName;
}

function patchAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function patch(old, fresh) {
  if (old.nodeType === Node.ELEMENT_NODE) patchAttributes(old, fresh);
  else if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
  if (old.matches?.("input") && old === document.activeElement) return;
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((node, at) => {
    if (at >= before.length) old.append(node);
    else if (isSame(before[at], node)) patch(before[at], node);
    else before[at].replaceWith(node);
  });
  before.slice(after.length).forEach((node) => node.remove());
}

function showAge() {
  const seconds = Math.round((Date.now() - lastAt) / 1000);
  const text = seconds < LATE_S ? "live" : `no answer for ${seconds} s`;
  if (pulse.textContent !== text) pulse.textContent = text;
  pulse.classList.toggle("late", seconds >= LATE_S);
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      signedOut.hidden = !answer.redirected;
      if (answer.ok && !answer.redirected) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = page.querySelector("main");
        annotate(fresh);
        patch(main, fresh);
        lastAt = Date.now();
      }
    } catch {
      // The next turn tries again; the age of the page is shown below.
    }
  } else {
    lastAt = Date.now();
  }
  if (signedOut.hidden) showAge();
  else pulse.textContent = "";
  setTimeout(refresh, EVERY_MS);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, EVERY_MS);
});

annotate(document);
if (isLive) {
  showAge();
  setTimeout(refresh, EVERY_MS);
}
