"""Everything that crosses the border between the gateway and an engine worker.

Frozen structs, sent as MessagePack. This module needs nothing but msgspec, so that the HTTP side
can import it without torch. Requests flow to the worker as one `Command`, answers come back as an
`Events` batch: one message per engine iteration, however many requests moved in it.
"""

from typing import Literal

from msgspec import Struct

# --- settings the worker starts with -----------------------------------------------------------


class EngineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How one engine runs. Bytes are MiB, lengths are tokens."""

    model: str = ""
    """Base model: a Hugging Face folder or a GGUF file."""
    name: str = ""
    """Model id that clients use for the bare base model; empty: the file or folder name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA where PyTorch finds a GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights, KV and adapters. `auto` is float32 on CPU and bfloat16 on CUDA."""
    batch_invariant: Literal["auto", "on", "off"] = "auto"
    """Whether an answer's bits depend on nothing but its request: not on other requests, chunks of
    the prompt, preemption or pages. `auto` is off on CUDA. On a CPU it is always so, but for
    float16."""
    threads: int = 0
    """CPU threads of the engine; 0: all cores that the process may use."""
    pool_mib: float = 1024
    """Size of the one page pool that holds KV and adapters."""
    block_tokens: int = 16
    """Tokens of one KV block, which is one page of the pool."""
    context_tokens: int = 0
    """Longest prompt plus output; 0: what the model was trained for."""
    step_tokens: int = 256
    """Token budget of one iteration: decodes first, prefill chunks fill the rest."""
    running_max: int = 64
    """Sequences in one iteration at most."""
    waiting_max: int = 1024
    """Requests queued at most; beyond it the engine answers `overloaded`."""
    host_adapters_mib: int = 1024
    """Host memory for adapters kept ready in page format."""
    cuda_graphs: bool = True
    """On CUDA, launch decoding steps as recorded graphs. At every start they are compared with
    the same steps launched one by one; if they differ or memory is short, a warning says so and
    the engine runs without. `false` saves their memory and a few seconds of the start."""


# --- to the worker ------------------------------------------------------------------------------


class AdapterRef(Struct, frozen=True):
    """An immutable adapter version: what to compute with, and where its bytes lie."""

    digest: str
    folder: str
    """Made by the adapter store; holds `MANIFEST_FILE` and `WEIGHTS_FILE`."""


MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "adapter_model.safetensors"


EMBEDDINGS = ("embed_tokens", "lm_head")
"""The targets outside of the layers: the input and the output embeddings."""


class TargetWeights(Struct, frozen=True):
    """One adapted projection of one layer: y += scale · B(A x)."""

    layer: int
    """0 for EMBEDDINGS."""
    target: str
    """`q_proj`, `k_proj`, … `down_proj`, or one of EMBEDDINGS. The x of `embed_tokens` has a 1 at
    the token and is 0 elsewhere."""
    rank: int
    scale: float
    """Resolved once at upload (alpha, rsLoRA and patterns), never again from alpha and rank."""
    a: str
    """Tensor name in the weights file, shape (rank, in_features)."""
    b: str
    """Tensor name in the weights file, shape (out_features, rank)."""


class AdapterManifest(Struct, frozen=True):
    """What the upload found in a PEFT folder, stored beside its weights for the engine."""

    weights_sha256: str
    targets: list[TargetWeights]


class Sampling(Struct, frozen=True):
    """How the next token is chosen. Temperature 0 is greedy, and the rest is then unused."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class Submit(Struct, frozen=True, tag="submit"):
    """One request: a prompt, already tokenized, and how to continue it."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    adapter: AdapterRef | None = None
    stop_token_ids: list[int] = []
    """Tokens that end the answer; they are not part of it."""
    fairness_key: str = ""
    """Opaque to the engine: requests of one key share one turn."""
    fairness_weight: float = 1.0
    """Tokens of a key with weight 2 count half."""
    cache_namespace: str | None = None
    """Opaque to the engine: requests of one namespace go on from each other's cached prefixes.
    None: it neither uses nor leaves any."""
    first_token_s: float | None = None
    """Seconds from now within which its first token is of use. If that can't be had, it is
    refused as `late` instead of queued. None: it waits for as long as it takes."""


class Cancel(Struct, frozen=True, tag="cancel"):
    """Forget a request; its pages are free after the running iteration, and `Finished` tells what
    was computed. Unknown ids are ignored: those have ended, and were told so."""

    request_id: str


class Unload(Struct, frozen=True, tag="unload"):
    """Drop an adapter version from every tier as soon as no running request uses it."""

    digest: str


class Pin(Struct, frozen=True, tag="pin"):
    """Keep an adapter version in the pool from when it is first used until `Unpin` or `Unload`."""

    digest: str


class Unpin(Struct, frozen=True, tag="unpin"):
    digest: str


class GetStats(Struct, frozen=True, tag="get_stats"):
    query_id: str


class GetPlaces(Struct, frozen=True, tag="get_places"):
    """Where are these adapter versions?"""

    query_id: str
    digests: list[str]


class Shutdown(Struct, frozen=True, tag="shutdown"):
    pass


Command = Submit | Cancel | Unload | Pin | Unpin | GetStats | GetPlaces | Shutdown

# --- from the worker ----------------------------------------------------------------------------

FailureCode = Literal[
    "prompt_too_long",  # prompt alone does not fit the context or the pool
    "adapter_failed",  # the adapter could not be loaded; detail says why
    "not_finite",  # the adapter's or the model's numbers overflowed
    "overloaded",  # the queue is full
    "late",  # its first token would not come in time
    "engine_lost",  # the worker died or is not there (said by the client, not the worker)
    "internal",
]


class ModelInfo(Struct, frozen=True):
    """What the HTTP side must know of the base model, sent once when the worker is ready."""

    digest: str
    name: str
    model_path: str
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    eos_token_ids: list[int]
    projections: dict[str, tuple[int, int]]
    """Target module (`q_proj`, …) → (out_features, in_features), the same in every layer."""
    embeddings_sha256: dict[str, str]
    """Of each of EMBEDDINGS, SHA-256 of its (vocab_size, hidden_size) values in `dtype`, little
    endian: the same for both in a model that ties them."""
    dtype: str
    device: str

    @property
    def ties_embeddings(self) -> bool:
        digests = self.embeddings_sha256
        return digests["embed_tokens"] == digests["lm_head"]

    @property
    def targets(self) -> dict[str, tuple[int, int]]:
        """`projections`, and the same of EMBEDDINGS, of which there is one each."""
        hidden, vocabulary = self.hidden_size, self.vocab_size
        return self.projections | {
            "embed_tokens": (hidden, vocabulary),
            "lm_head": (vocabulary, hidden),
        }


class Ready(Struct, frozen=True, tag="ready"):
    info: ModelInfo


class StartFailed(Struct, frozen=True, tag="start_failed"):
    """The worker can't serve with these settings, and trying again would not change that."""

    detail: str


class Tokens(Struct, frozen=True, tag="tokens", omit_defaults=True):
    """New tokens of one request, in order."""

    request_id: str
    ids: list[int]
    cached_tokens: int = 0
    """With the first of them, the same as in `Finished`."""


class Finished(Struct, frozen=True, tag="finished"):
    request_id: str
    reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    """Of a request that was cancelled: as many as had been computed."""
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt: those whose KV was in the cache."""


class Failed(Struct, frozen=True, tag="failed"):
    request_id: str
    code: FailureCode
    detail: str
    retry_after_s: float | None = None
    """When it may go better, where that can be foreseen."""


class Stats(Struct, frozen=True, tag="stats"):
    """A snapshot between two iterations."""

    query_id: str
    pages_total: int
    pages_free: int
    pages_kv: int
    """Of running requests."""
    pages_prefixes: int
    """Of cached prefixes, those that running requests read included."""
    pages_adapters: int
    running: int
    waiting: int
    iterations: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    """Tokens of prompts that were not computed, as their KV was cached."""
    preemptions: int
    adapters_resident: int
    adapters_host: int
    adapter_loads: int
    """Copies host → pool."""
    adapter_reads: int
    """Reads store → host."""
    batch_adapters_max: int
    """Most distinct adapters seen in one forward pass."""


Place = Literal[
    "pool",  # in the page pool: a request can use it at once
    "host",  # in host memory, ready to be copied into the pool
    "store",  # in the adapter store alone
]


class Places(Struct, frozen=True, tag="places"):
    """Where versions were between two iterations."""

    query_id: str
    places: dict[str, Place]
    """Digest → the nearest place."""


Event = Ready | StartFailed | Tokens | Finished | Failed | Stats | Places


class Events(Struct, frozen=True):
    """All that one iteration has to say."""

    events: list[Event]
