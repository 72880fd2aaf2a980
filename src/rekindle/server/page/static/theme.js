// Light or dark as the system says, until somebody chooses. Runs before the first paint, so that nothing flashes.
(() => {
  const KEPT = "rekindle-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => root.dataset.theme ?? (system.matches ? "dark" : "light");

  const kept = localStorage.getItem(KEPT);
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;

  function describe(button) {
    const other = chosen() === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `Switch to ${other}`);
    button.title = `Switch to ${other}`;
  }

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    describe(button);
    system.addEventListener("change", () => describe(button));
    button.addEventListener("click", () => {
      root.dataset.theme = chosen() === "dark" ? "light" : "dark";
      localStorage.setItem(KEPT, root.dataset.theme);
      describe(button);
    });
  });
})();
