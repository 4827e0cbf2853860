"""The page at ``/docs``: reads ``/openapi.json`` and lets people try each operation. No file beside it."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sparrow API</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #8881; --link: #2a6fdb; }
  body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1.5rem; }
  h1 { margin: 0 0 .5rem; } h2 { margin: 2rem 0 .5rem; text-transform: capitalize; }
  details { border: 1px solid var(--line); border-radius: .5rem; margin: .4rem 0; }
  summary { cursor: pointer; padding: .5rem .8rem; display: flex; gap: .8rem; align-items: baseline; }
  details > div { border-top: 1px solid var(--line); padding: .8rem; }
  .method { font: 600 .8rem ui-monospace, monospace; width: 4rem; color: var(--link); }
  .path { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
  .what { margin-left: auto; opacity: .75; }
  label { display: grid; grid-template-columns: 12rem 1fr; gap: .5rem; margin: .3rem 0; align-items: center; }
  input, textarea, select { font: inherit; padding: .3rem .5rem; border: 1px solid var(--line);
    border-radius: .3rem; width: 100%; box-sizing: border-box; background: transparent; color: inherit; }
  textarea, pre { font: .85rem/1.4 ui-monospace, monospace; }
  pre { background: var(--soft); padding: .7rem; border-radius: .3rem; overflow: auto; max-height: 24rem; }
  button { font: inherit; padding: .35rem 1rem; border-radius: .3rem; border: 1px solid var(--line);
    cursor: pointer; }
</style>
<h1>Sparrow API</h1>
<p id="about"></p>
<label>Token, where one is wanted <input id="token" type="password" autocomplete="off"></label>
<main id="all">Loading…</main>
<noscript>This page needs JavaScript. The same is at <a href="/openapi.json">/openapi.json</a>.</noscript>
<script>
const make = (tag, fields = {}, ...inside) => {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...inside);
  return node;
};
const field = (name, node) => make("label", {}, name, node);

function operation(path, method, spec) {
  const inputs = (spec.parameters || []).map((each) => [each, make("input", {
    placeholder: each.schema.default ?? each.description ?? each.in, required: each.required })]);
  const content = spec.requestBody?.content;
  const kinds = make("select", {}, ...Object.keys(content || {}).map((kind) => make("option", {}, kind)));
  const first = content && Object.values(content)[0];
  const example = first?.example ? JSON.stringify(first.example, null, 2) : "";
  const text = make("textarea", { rows: 8, value: example });
  const out = make("pre", { hidden: true });
  const send = make("button", { textContent: "Send" });
  send.onclick = async () => {
    let url = path;
    const query = new URLSearchParams(), headers = {};
    for (const [each, input] of inputs) {
      if (each.in === "path") url = url.replace(`{${each.name}}`, encodeURIComponent(input.value));
      else if (input.value && each.in === "query") query.set(each.name, input.value);
      else if (input.value) headers[each.name] = input.value;
    }
    if (document.getElementById("token").value)
      headers.authorization = `Bearer ${document.getElementById("token").value}`;
    const options = { method: method.toUpperCase(), headers };
    if (content && text.value) { options.body = text.value; headers["content-type"] = kinds.value; }
    out.hidden = false;
    out.textContent = "…";
    try {
      const answer = await fetch(url + (query.size ? `?${query}` : ""), options);
      out.textContent = `${answer.status} ${answer.statusText}\\n`;
      const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
      let body = "";
      for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
        body += part.value;
        out.textContent = `${answer.status} ${answer.statusText}\\n${body.slice(-100000)}`;
      }
      try {
        out.textContent = `${answer.status}\\n${JSON.stringify(JSON.parse(body), null, 2)}`;
      } catch { /* It is not JSON, and stands there as it is. */ }
    } catch (error) { out.textContent = String(error); }
  };
  const told = Object.entries(spec.responses).map(([status, each]) => `${status} ${each.description}`);
  const answers = told.join(", ");
  const inside = make("div", {}, make("p", {}, spec.description || spec.summary),
    ...inputs.map(([each, input]) => field(`${each.name}${each.required ? " *" : ""}`, input)));
  if (content) inside.append(field("Content-Type", kinds), text);
  inside.append(make("p", {}, send), out, make("p", {}, `Answers: ${answers}`));
  const part = (className, textContent) => make("span", { className, textContent });
  const line = [part("method", method.toUpperCase()), part("path", path), part("what", spec.summary)];
  return make("details", {}, make("summary", {}, ...line), inside);
}

fetch("/openapi.json").then((answer) => answer.json()).then((api) => {
  document.getElementById("about").textContent = `Version ${api.info.version}. ${api.info.description}`;
  const all = document.getElementById("all");
  all.textContent = "";
  const groups = new Map(api.tags.map((tag) => [tag.name, []]));
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, spec] of Object.entries(methods)) {
      const tag = spec.tags?.[0] ?? "other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operation(path, method, spec));
    }
  for (const [tag, operations] of groups) all.append(make("h2", { textContent: tag }), ...operations);
});
</script>
</html>
"""
