"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // Pages opened from disk may have no storage; the choice then lasts as long as the page.
  const storage = (action) => {
    try {
      return action(window.localStorage);
    } catch {
      return null;
    }
  };
  const THEMES = ["light", "dark"];
  const stored = storage((store) => store.getItem("strucspars-theme"));
  if (THEMES.includes(stored)) root.dataset.theme = stored;

  const shownTheme = () =>
    root.dataset.theme ?? (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  function prepareTheme(button) {
    const label = () => (button.textContent = shownTheme() === "dark" ? "Light" : "Dark");
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = shownTheme() === "dark" ? "light" : "dark";
      storage((store) => store.setItem("strucspars-theme", root.dataset.theme));
      label();
    });
    label();
  }

  function prepareLayers(select) {
    const layers = Array.from(select.options, (option) => document.getElementById(option.value));
    const [previous, next] = document.querySelectorAll(".chooser button");
    const choose = (place) => {
      layers.forEach((layer, other) => layer.classList.toggle("chosen", other === place));
      select.selectedIndex = place;
      previous.disabled = place === 0;
      next.disabled = place === layers.length - 1;
    };
    const chooseTarget = () => {
      const place = layers.findIndex((layer) => `#${layer.id}` === window.location.hash);
      if (place < 0) return;
      choose(place);
      document.getElementById("layer-view").scrollIntoView();
    };
    select.addEventListener("change", () => choose(select.selectedIndex));
    previous.addEventListener("click", () => choose(select.selectedIndex - 1));
    next.addEventListener("click", () => choose(select.selectedIndex + 1));
    window.addEventListener("hashchange", chooseTarget);
    choose(select.selectedIndex);
    chooseTarget();
  }

  function compared(first, second) {
    const [a, b] = [first, second].map(Number);
    return Number.isNaN(a) || Number.isNaN(b) ? first.localeCompare(second, undefined, { numeric: true }) : a - b;
  }

  // Cells without a value stay below the others, whichever way the rest is sorted.
  function sorted(rows, column, direction) {
    const key = (row) => row.cells[column].dataset.sort;
    const filled = rows.filter((row) => key(row) !== "");
    filled.sort((first, second) => direction * compared(key(first), key(second)));
    return [...filled, ...rows.filter((row) => key(row) === "")];
  }

  function prepareTable(table) {
    const body = table.tBodies[0];
    const original = Array.from(body.rows);
    const headings = Array.from(table.tHead.rows[0].cells);
    // A third click gives the first order back.
    const following = { none: "ascending", ascending: "descending", descending: "none" };
    headings.forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        const order = following[heading.getAttribute("aria-sort")];
        headings.forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", order);
        const rows = order === "none" ? original : sorted(original, column, order === "ascending" ? 1 : -1);
        body.append(...rows);
      });
    });
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("button.theme").forEach(prepareTheme);
    document.querySelectorAll("select.layers").forEach(prepareLayers);
    document.querySelectorAll("table.sortable").forEach(prepareTable);
  });
})();
