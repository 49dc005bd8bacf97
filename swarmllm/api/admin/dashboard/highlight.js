// Code in colours: comments, strings, numbers and the words of the usual languages, as elements.

import { h } from "./dom.js";

const WORDS = new Set(("abstract and as async await bool break case catch char class const continue def default defer del delete do done double elif else end enum esac except export extends "
  + "extern false fi final finally float fn for from func function global go goto if impl implements import in int interface is lambda let local long loop match mod module mut namespace new nil "
  + "None nonlocal not null or package pass private protected pub public raise ref return self short signed sizeof static struct super switch template then this throw trait True False true try "
  + "type typedef typeof undefined union unsafe unsigned use using var void volatile where while with yield").split(" "));
const SQL = new Set(("all alter and as asc between by case create delete desc distinct drop else end exists from group having in index inner insert into is join key left like limit not null on or order "
  + "outer primary right select set table then union unique update values view when where with").split(" "));
const HASH = new Set(["bash", "sh", "shell", "zsh", "console", "python", "py", "ruby", "rb", "yaml", "yml", "toml", "perl", "r", "dockerfile", "makefile", "ini", "nix", "elixir"]);
const DASHES = new Set(["sql", "lua", "haskell"]);
const PLAIN = new Set(["", "text", "txt", "plain", "markdown", "md", "diff", "html", "xml"]);
const LONGEST = 20000; // characters: an answer is drawn again with each of its tokens

const STRINGS = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|` + "`(?:\\\\.|[^`\\\\])*`?";
const REST = String.raw`|(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_$][\w$]*)`;
const tokens = (comment, strings = STRINGS) => new RegExp(`(?<comment>${comment})|(?<string>${strings})${REST}`, "g");
const BY_HASH = tokens("#[^\\n]*", `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRINGS}`);
const BY_DASHES = tokens("--[^\\n]*");
const BY_SLASHES = tokens("//[^\\n]*|/\\*[^]*?(?:\\*/|$)");

/** Text and elements that together read as `code`. */
export function highlight(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || code.length > LONGEST) return [code];
  const parts = [];
  let at = 0;
  for (const { 0: text, index, groups } of code.matchAll(HASH.has(name) ? BY_HASH : DASHES.has(name) ? BY_DASHES : BY_SLASHES)) {
    const isWord = name === "sql" ? SQL.has(text.toLowerCase()) : WORDS.has(text);
    const kind = groups.comment ? "comment" : groups.string ? "string" : groups.number ? "number" : isWord && "word";
    if (!kind) continue;
    parts.push(code.slice(at, index), h("span", { class: `code-${kind}` }, text));
    at = index + text.length;
  }
  return [...parts, code.slice(at)];
}
