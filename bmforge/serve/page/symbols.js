// Names of LaTeX's symbols, by their role in MathML.

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));

export const SYMBOLS = pairs(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ
  lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ
  varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ
  Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅
  imath=ı jmath=ȷ top=⊤ bot=⊥ angle=∠ degree=°`);

export const OPERATORS = pairs(`
  times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗ odot=⊙ le=≤ leq=≤ ge=≥
  geq=≥ ne=≠ neq=≠ ll=≪ gg=≫ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ in=∈ notin=∉ ni=∋
  subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ cup=∪ cap=∩ setminus=∖ forall=∀ exists=∃ nexists=∄ neg=¬
  lnot=¬ land=∧ wedge=∧ lor=∨ vee=∨ to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔
  Rightarrow=⇒ implies=⟹ Leftarrow=⇐ Leftrightarrow=⇔ iff=⟺ mapsto=↦ uparrow=↑ downarrow=↓
  longrightarrow=⟶ ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋
  lceil=⌈ rceil=⌉ lvert=| rvert=| lVert=‖ rVert=‖ vert=| Vert=‖ mid=∣ parallel=∥ perp=⟂ prime=′
  colon=: lbrace={ rbrace=} lbrack=[ rbrack=] backslash=\\ therefore=∴ because=∵ models=⊨ vdash=⊢`);

export const LARGE = pairs(`
  sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂
  bigvee=⋁ bigwedge=⋀`);

export const SPACES = {
  ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.33em", quad: "1em", qquad: "2em",
};

export const FUNCTIONS = new Set(("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp log ln lg "
  + "det dim ker deg gcd hom arg lim limsup liminf max min sup inf Pr argmax argmin").split(" "));
export const LIMITS = new Set("lim limsup liminf max min sup inf det gcd Pr argmax argmin".split(" "));

export const ACCENTS = {
  hat: ["^", "mover"], widehat: ["^", "mover"], bar: ["¯", "mover"], overline: ["¯", "mover"],
  vec: ["→", "mover"], overrightarrow: ["→", "mover"], dot: ["˙", "mover"], ddot: ["¨", "mover"],
  tilde: ["~", "mover"], widetilde: ["~", "mover"], check: ["ˇ", "mover"], underline: ["_", "munder"],
  overbrace: ["⏞", "mover"], underbrace: ["⏟", "munder"],
};

const bold = { upper: 0x1d400, lower: 0x1d41a, digit: 0x1d7ce };
const script = {
  upper: 0x1d49c, lower: 0x1d4b6,
  exceptions: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
};
const double = {
  upper: 0x1d538, lower: 0x1d552, digit: 0x1d7d8,
  exceptions: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
};
const fraktur = {
  upper: 0x1d504, lower: 0x1d51e, exceptions: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
};
export const ALPHABETS = {
  mathrm: "rm", mathbf: bold, boldsymbol: bold, bm: bold, mathcal: script, mathscr: script,
  mathbb: double, mathfrak: fraktur,
  mathsf: { upper: 0x1d5a0, lower: 0x1d5ba, digit: 0x1d7e2 },
  mathtt: { upper: 0x1d670, lower: 0x1d68a, digit: 0x1d7f6 },
  mathit: "",
};
