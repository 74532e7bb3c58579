// The search page: one result a page, ranked by where the query's words stand in it; below it the page's summary and its places.
"use strict";
(() => {
  const WEIGHTS = { title: 10, typed: 8, headings: 4, summary: 3, names: 2, text: 1 }, PHRASE = 30, MOST = 25;
  const pages = JSON.parse(document.getElementById("search-pages").textContent);   // name: [summary, words that readers type]
  const stemmer = new Stemmer(), stem = word => stemmer.stemWord(word);
  const split = text => splitQuery(text.toLowerCase()).filter(word => !stopwords.has(word));
  const joined = text => text.match(/\p{Letter}+(?:-[\p{Letter}\p{Number}]+)+/gu)?.map(word => word.replaceAll("-", "")) ?? [];
  const stems = texts => [...new Set(split(texts.flatMap(text => [text, ...joined(text)]).join(" ")).map(stem))];
  const plain = text => text.toLowerCase().replace(/^\d\w* /, "").trim();
  const once = f => { let value; return () => value ??= f(); };

  // Every page: its places as [title, anchor], and the stems of each field
  const readBook = once(() => {
    const { docnames, titles, alltitles, objects } = Search._index, known = new Set(titles.map(plain));
    const headings = docnames.map(() => []), names = docnames.map(() => []);
    for (const [title, places] of Object.entries(alltitles)) if (!known.has(plain(title)))
      for (const [page, id] of places) headings[page].push([title.trim().replace(/^\((.*)\)$/, "$1"), id]);
    for (const [module, all] of Object.entries(objects))
      for (const [page, , , , name] of all) names[page].push([name, `${module}.${name}`]);
    return docnames.map((name, i) => {
      const [summary, words] = pages[name], typed = [name.replaceAll("_", " "), ...words];
      const said = (places, f = x => x) => places.map(([title]) => f(title));
      const fields = { title: [titles[i]], typed, headings: said(headings[i]), summary: [summary],
        names: [...said(names[i]), ...said(names[i], x => x.replaceAll("_", " "))] };
      return { name, title: titles[i], summary, places: [...headings[i], ...names[i]],
        phrases: [titles[i], ...typed, ...fields.headings].map(plain),
        stems: Object.entries(fields).map(([field, texts]) => [WEIGHTS[field], stems(texts)]) };
    });
  });

  // Each stem: the weight on every page that has it; in the text of a long page it weighs less
  const readStems = once(() => {
    const stems = new Map(), terms = Object.entries(Search._index.terms), sizes = readBook().map(() => 0);
    const add = (stem, page, weight) => {
      if (!stems.has(stem)) stems.set(stem, new Map());
      stems.get(stem).set(page, (stems.get(stem).get(page) ?? 0) + weight);
    };
    readBook().forEach((page, i) => page.stems.forEach(([weight, all]) => all.forEach(stem => add(stem, i, weight))));
    for (const at of terms.flatMap(([, at]) => at)) sizes[at] += 1;
    const usual = sizes.reduce((a, b) => a + b, 0) / sizes.length;
    for (const [stem, at] of terms) for (const page of [at].flat()) add(stem, page, WEIGHTS.text * Math.min(1, usual / sizes[page]));
    return stems;
  });

  // The stems that a word means: itself and its plural, or where neither is known, those that begin with it
  function meant(word) {
    const known = [word, `${word}s`].filter(stem => readStems().has(stem));
    return known.length || word.length < 3 ? known : [...readStems().keys()].filter(stem => stem.startsWith(word));
  }

  function weigh(stems) {
    const found = new Map();
    for (const stem of stems) for (const [page, weight] of readStems().get(stem)) found.set(page, (found.get(page) ?? 0) + weight);
    return [...found].map(([page, weight]) => [page, weight * Math.log(1 + readBook().length / found.size)]);
  }

  function rank(query) {
    const book = readBook(), words = split(query).map(stem), tests = words.map(meant).filter(stems => stems.length), scores = new Map();
    const add = (stems, words) => weigh(stems).forEach(([page, weight]) => {
      const [had, score] = scores.get(page) ?? [0, 0];
      scores.set(page, [had + words, score + weight]);
    });
    tests.forEach(stems => add(stems, 1));
    joined(query).map(stem).map(meant).forEach(stems => add(stems, 0));
    const found = [...scores].map(([i, [words, score]]) =>
      [book[i], score * (words / Math.max(1, tests.length)) ** 2 + PHRASE * book[i].phrases.includes(plain(query))]);
    const missing = split(query).filter(word => !meant(stem(word)).length);
    return { found: found.sort((a, b) => b[1] - a[1]).map(([page]) => page), tests, missing };
  }

  function element(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }
  const link = (text, page, anchor) => Object.assign(element("a", "", text), { href: `${page}.html${anchor ? `#${anchor}` : ""}` });

  Search.query = query => {
    const { found, tests, missing } = rank(query);
    for (const page of found.slice(0, MOST)) {
      const holds = ([title]) => { const own = stems([title, title.replaceAll("_", " ")]); return tests.every(meant => meant.some(x => own.includes(x))); };
      const places = page.places.filter(holds).slice(0, 4).flatMap(([title, id], i) => [i ? " · " : "", link(title, page.name, id)]);
      const item = element("li", "", link(page.title, page.name), element("p", "context", page.summary));
      if (places.length) item.append(element("p", "places", ...places));
      Search.output.append(item);
    }
    Search.stopPulse();
    Search.title.innerText = "Search results";
    Search.status.innerText = `${found.length} page${found.length === 1 ? "" : "s"}`
      + (found.length > MOST ? `, of which the best ${MOST} are shown` : "")
      + (missing.length ? `; no page has ${missing.join(", ")}` : "") + ".";
  };
})();
