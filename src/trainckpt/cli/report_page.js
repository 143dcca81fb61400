"use strict";
// Tips of the marks, for pointers and fingers, and legends that hide a series. All texts are set as
// text, never as markup.
const tip = document.getElementById("tip");

function show(mark, x, y) {
  tip.textContent = mark.getAttribute("aria-label");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(x - box.width / 2, 12), window.innerWidth - box.width - 12);
  const above = y - box.height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : y + 18}px`;
}

for (const kind of ["pointermove", "click"]) {
  document.addEventListener(kind, (event) => {
    const mark = event.target.closest(".mark");
    if (mark) show(mark, event.clientX, event.clientY);
    else tip.hidden = true;
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});
window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// The text of a mark's title goes to the tip: the browser's own would come on top of it.
for (const title of document.querySelectorAll(".mark > title")) {
  title.parentNode.setAttribute("aria-label", title.textContent);
  title.remove();
}

for (const button of document.querySelectorAll("button[data-toggle]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    for (const mark of button.closest("figure").querySelectorAll("[data-series]")) {
      if (mark.dataset.series === button.dataset.toggle) mark.toggleAttribute("data-off", !on);
    }
  });
}
