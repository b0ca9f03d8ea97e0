// Applies the theme that the reader chose before the page is drawn; without a choice the system's setting counts.
(function () {
  try {
    const theme = localStorage.getItem("meshwright-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch { /* storage is turned off: the system's setting counts */ }
})();
