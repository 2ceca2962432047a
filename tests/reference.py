"""What transformers makes of the test model: the reference that Loragate is compared with.

transformers loads the same GGUF with its own dequantisation. Its conversion of the tokenizer
leaves one thing out: SmolLM2 takes every digit for itself before the rest is cut (so does
llama.cpp), without which blanks before a digit get other tokens. That one part is put right here.
"""

import copy
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache" / "reference"
AS_CONVERTED = "tokenizer-as-converted"
"""Subfolder with the tokenizer before the correction."""
DEMO_ADAPTERS = REPOSITORY / "examples" / "adapters"

HARD_TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "  two leading spaces, two trailing  ",
    "tabs\tand\r\nWindows line ends\r\n\r\n",
    "\n\n\n\nlines\n\n \n  \n   end",
    "          ten spaces, then    four",
    "It's we're I'll you'd they've I'M DON'T o'clock rock'n'roll",
    "naïve café Straße Æsir Łódź İstanbul",
    "combining: e\u0301 n\u0303 a\u0323\u0302 한 Z\u0351\u036b\u0343\u036a\u0302\u036b",
    "你好，世界。日本語のテキスト 한국어 ภาษาไทย",
    "مرحبا بالعالم שלום नमस\u094dत\u0947 Привет, мир",
    "😀 👨\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👋🏽 🇩🇪 ❤\ufe0f",
    "\u200bzero\u200dwidth\u2060 nb\u00a0sp \u2003em\u2003 \ufeffbom \ufffd \u202ertl\u202c",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # {\"a\": [1, 2]}\n\n\nclass A:\n\tpass\n",
    "for (int i=0;i<n;++i){a[i]+=b[i]<<2;}//°C != µm",
    "SELECT * FROM t WHERE a='x''y' AND b<>NULL;--",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\dir\\file.txt",
    "<html><body class=\"x\">&amp;&nbsp;</body></html> <!-- -->",
    "$\\int_0^\\infty e^{-x^2}\\,dx=\\frac{\\sqrt{\\pi}}{2}$ ∑√≠≤",
    "!!!???...,,,;;;:::---___***///\\\\\\|||@@@###",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|im_start|>system\nHi<|im_end|>\n<|endoftext|>",
    "text<|im_end|>text <|im_end|> text<|im_start|><repo_name><file_sep>",
    "<|im_end", "im_end|>", "<|im_<|im_end|>end|>", "<|IM_END|>", "< |im_end|>",
    "\x00\x01\x7f\x80 control characters",
]  # fmt: skip
"""Texts whose tokens do not depend on how digits are cut."""

DIGIT_TEXTS = [
    "a  12\n\n1",
    "0123456789",
    "in 1984 there were 365 days, 3.14159 and 1,000,000",
    "x1 y2  z3   4\n5\n\n6\t7",
    "v1.2.3-rc4+5 10% $20 -7 \u00bd \u00b2 \u2168 \u0663\u0664 \uff11\uff12",
    "2024-02-29T12:34:56Z +49 (0)30 123456",
    "if x[10]>=20:\n    y = 0x1F\n",
]


def make_reference(gguf: Path) -> Path:
    """The Hugging Face folder of a GGUF in float32, made once and kept in .cache."""
    import transformers
    from transformers import AutoTokenizer

    size = gguf.stat().st_size
    key = hashlib.sha256(f"{size} {transformers.__version__} 2".encode()).hexdigest()[:16]
    folder = CACHE / f"{gguf.stem}-{key}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        reference_from_gguf(gguf).save_pretrained(unfinished)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tokenizer.save_pretrained(unfinished / AS_CONVERTED)
        with_single_digits(tokenizer).save_pretrained(unfinished)
        unfinished.rename(folder)
    except OSError:  # another run was faster
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def reference_from_gguf(gguf: Path) -> Any:
    """transformers' own loading of a GGUF, dequantised to float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()


def with_single_digits(tokenizer: Any) -> Any:
    """A copy that cuts digits as SmolLM2 does."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as Steps

    corrected = copy.deepcopy(tokenizer)
    corrected.backend_tokenizer.pre_tokenizer = Steps(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    return corrected


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a reference folder or its `AS_CONVERTED`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def load_reference(folder: Path) -> Any:
    """The model of a reference folder, float32, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return model.eval()
