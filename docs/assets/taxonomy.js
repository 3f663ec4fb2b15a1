// The finder of the zoo's page: shows the systems whose line has all the words that were typed, and opens their
// branches; an empty field gives the tree back as it was.
(function () {
  const field = document.getElementById("find-system");
  const tree = document.querySelector(".taxonomy");
  if (!field || !tree) return;
  const plain = (text) => text.toLowerCase().normalize("NFD").replace(/[\u0300-\u036f]/g, "").replace(/[-_]/g, " ");
  const lines = [...tree.querySelectorAll("li")].map((line) => {
    const path = [];
    for (let at = line.closest("details"); at; at = at.parentElement.closest("details")) {
      path.push(at.querySelector("summary").firstChild.textContent);
    }
    return { line, text: plain(line.textContent + " " + path.join(" ")) };
  });
  const branches = [...tree.querySelectorAll("details")];
  const before = branches.map((branch) => branch.open);
  const told = document.getElementById("find-count");
  function find() {
    const words = plain(field.value).split(/\s+/).filter(Boolean);
    let count = 0;
    for (const { line, text } of lines) {
      const fits = words.every((word) => text.includes(word));
      line.hidden = !fits;
      count += fits ? 1 : 0;
    }
    branches.forEach((branch, index) => {
      const any = branch.querySelector("li:not([hidden])");
      branch.hidden = !any;
      branch.open = words.length ? Boolean(any) : before[index];
    });
    told.textContent = words.length ? (count === 1 ? "1 system" : count + " systems") : "";
  }
  field.addEventListener("input", find);
  const asked = new URLSearchParams(location.search).get("find");
  if (asked) {
    field.value = asked;
    find();
  }
})();
