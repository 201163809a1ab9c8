// Splits code into [kind, text] pairs for coloring: comment, string, number, keyword or "".

const C_LIKE = "break case catch class const continue default delete do else enum export extends false finally "
  + "for function if import in interface let new null private protected public return static struct super switch "
  + "this throw true try type typeof undefined using var void while async await yield of fn mut impl pub match "
  + "use mod trait where func package range go defer int long float double char bool boolean string unsigned auto "
  + "namespace template typename virtual override final package abstract implements instanceof nil self";
const WORDS = {
  python: "and as assert async await break class continue def del elif else except False finally for from global "
    + "if import in is lambda match case None nonlocal not or pass raise return True try while with yield self",
  bash: "if then else elif fi for in do done while until case esac function return local export source exit set "
    + "cd echo sudo",
  sql: "select from where group by order having join left right inner outer on as insert into values update set "
    + "delete create table drop alter index view distinct limit offset union all and or not null is in like between "
    + "case when then else end primary key references",
  json: "true false null",
};
const ALIASES = { py: "python", python3: "python", sh: "bash", shell: "bash", zsh: "bash", console: "bash" };
const HASH = new Set(["python", "bash", "yaml", "toml", "ruby", "r", "dockerfile", "makefile", "ini"]);

export function highlight(code, name) {
  const language = ALIASES[name.toLowerCase()] ?? name.toLowerCase();
  if (!language || language === "text" || language === "plain") return [["", code]];
  const words = new Set((WORDS[language] ?? C_LIKE).split(" "));
  const comment = HASH.has(language) ? "#[^\\n]*"
    : language === "sql" ? "--[^\\n]*" : language === "json" ? "(?!)" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const string = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)|"
    + "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?|`(?:[^`\\\\]|\\\\.)*`?";
  const marks = new RegExp(
    `(?<comment>${comment})|(?<string>${string})|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`, "g");
  const parts = [];
  let end = 0;
  for (const match of code.matchAll(marks)) {
    const { comment: said, string: text, number, word } = match.groups;
    const known = word && words.has(language === "sql" ? word.toLowerCase() : word);
    const kind = said ? "comment" : text ? "string" : number ? "number" : known ? "keyword" : "";
    if (!kind) continue;
    if (match.index > end) parts.push(["", code.slice(end, match.index)]);
    parts.push([kind, match[0]]);
    end = match.index + match[0].length;
  }
  if (end < code.length) parts.push(["", code.slice(end)]);
  return parts;
}
