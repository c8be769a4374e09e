"""How byte-level BPE vocabularies cut text into words before merging, by the names that GGUF files use.

The expressions are those of the models' own `tokenizer.json` files; the names are listed in
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp. Each expression in turn cuts the
pieces that the one before left; what lies between two matches is a piece too.
"""

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CHINESE_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
PUNCTUATED = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
CASED_LETTERS = (  # of the Unicode version that DeepSeek LLM was made with
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _words(digits: str, *, contractions: str = CONTRACTIONS + "|", marks: str = "") -> str:
    """The shape that most expressions since cl100k share: words, numbers, punctuation, white space."""
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{SPACES}"
    )


def _cased_words(digits: str, *, contractions: str = "", han: str = "", after: str = r"\r\n/") -> str:
    """The same where a word ends at a change from lower to upper case (o200k, Tekken, Kimi)."""
    upper, lower, start = f"[{UPPER}{han}]", f"[{LOWER}{han}]", r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{contractions}|{start}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after}]*|{SPACES}"
    )


LLAMA3 = (_words(r"\p{N}{1,3}"),)
QWEN2 = (_words(r"\p{N}"),)
DIGITS_THEN_GPT2 = (r"\p{N}", GPT2)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    CHINESE_AND_KANA,
    PUNCTUATED + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
GPT_4O = (_cased_words(r"\p{N}{1,3}", contractions=CONTRACTIONS + "?"),)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)

EXPRESSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
         "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "megrez", "grok-2"),
        QWEN2,
    ),
    "qwen35": (_words(r"\p{N}", marks=r"\p{M}"),),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
         "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion", "exaone4",
         "granite-docling"), (GPT2,)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        DIGITS_THEN_GPT2,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT_4O),
    "tekken": (_cased_words(r"\p{N}"),),
    "kimi-k2": (
        r"\p{Han}+|"
        + _cased_words(r"\p{N}{1,3}", contractions=CONTRACTIONS + "?", han=r"&&[^\p{Han}]", after=r"\r\n"),
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (BLOOM,)),
    "viking": (BLOOM, r"\p{N}"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "seed-coder": (
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACES,
    ),
    "ufakzeka": (_words(r"\p{N}", contractions=""),),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(
        r"\p{N}{1,3}", contractions=CONTRACTIONS + "?"))),
}  # fmt: skip

# Kinds whose words are looked up whole before they are merged, and kinds that begin every text with BOS.
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
               "jina-v5-nano", "tekken", "minicpm5"}  # fmt: skip
ADDS_BOS = WHOLE_WORDS - {"minicpm5"}


def pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text as vocabularies of this kind do, and turns it into the byte-level alphabet."""
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in EXPRESSIONS[kind]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
