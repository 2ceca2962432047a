"""The decoder of the Llama family as plain functions over packed weights.

One definition serves Llama, SmolLM2, Mistral, Qwen2 and Qwen3: grouped-query attention, optional
biases on q/k/v, optional norms on q and k, optional sliding window, optionally tied embeddings.

T tokens · D hidden size · C fused output columns · X heads of q, k and v
H query heads · K KV heads · E head dimension · S sampling sequences · V vocabulary
"""

from dataclasses import dataclass
from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from gateway.engine.kernels.segments import LoraSegment, Work
from gateway.engine.memory.buffer import PageBuffer
from gateway.engine.model.batch import Batch
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.rope import Rope
from gateway.engine.model.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class Decoder:
    config: ModelConfig
    weights: Weights
    rope: Rope
    buffer: PageBuffer
    kernels: ModuleType
    """The ops of the device, see `gateway.engine.kernels`."""

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch, writing its KV into the pool. Returns the logits (S, V) that
        follow the last token of each sampling slice."""
        x_TD = self._embed(batch)
        rope = self.rope.at(batch.positions_T, x_TD.dtype)
        for index, layer in enumerate(self.weights.layers):
            x_TD = x_TD + self._attention(index, layer, x_TD, batch, rope)
            x_TD = x_TD + self._mlp(index, layer, x_TD, batch)
        last_SD = self.kernels.rms_norm(
            x_TD[batch.last_S], self.weights.final_norm_D, self.config.rms_eps
        )
        logits_SV: Tensor = self.kernels.linear(last_SD, self.weights.head_VD)
        self._adapt(last_SD, logits_SV, batch.head, 0, "head")
        return logits_SV

    def _embed(self, batch: Batch) -> Tensor:
        x_TD = F.embedding(batch.tokens_T, self.weights.embed_VD)
        if batch.embed:
            place = self.buffer.pages_NP, batch.embed, 0, "embed"
            gathered = self.kernels.lora_gather(batch.tokens_T, *place)
            self.kernels.lora_expand(gathered, *place, x_TD)
        return x_TD

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TD: Tensor,
        batch: Batch,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self.config
        x_TD = self.kernels.rms_norm(x_TD, layer.input_norm_D, config.rms_eps)
        qkv_TC = self.kernels.linear(x_TD, layer.qkv_ND, layer.qkv_bias_N)
        self._adapt(x_TD, qkv_TC, batch.lora, index, "qkv")
        qkv_TXE = qkv_TC.view(len(qkv_TC), -1, config.head_dim)
        keys = config.heads + config.kv_heads
        q_THE, k_TKE, v_TKE = qkv_TXE.tensor_split([config.heads, keys], dim=1)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            q_THE = self.kernels.rms_norm(q_THE, layer.q_norm_H, config.rms_eps)
            k_TKE = self.kernels.rms_norm(k_TKE, layer.k_norm_H, config.rms_eps)
        q_THE, k_TKE = self.kernels.rotate(q_THE, *rope), self.kernels.rotate(k_TKE, *rope)
        cache_N2BKE = self.buffer.kv_layers[index]
        self.kernels.write_kv(k_TKE, v_TKE, cache_N2BKE, batch.page_T, batch.slot_T)
        out_THE = self.kernels.paged_attention(
            q_THE, cache_N2BKE, batch.spans, config.head_dim**-0.5, config.sliding_window
        )
        out_TC = out_THE.flatten(1)
        y_TD: Tensor = self.kernels.linear(out_TC, layer.o_DN)
        self._adapt(out_TC, y_TD, batch.lora, index, "o")
        return y_TD

    def _mlp(self, index: int, layer: LayerWeights, x_TD: Tensor, batch: Batch) -> Tensor:
        x_TD = self.kernels.rms_norm(x_TD, layer.post_norm_D, self.config.rms_eps)
        gate_up_TC = self.kernels.linear(x_TD, layer.gate_up_FD)
        self._adapt(x_TD, gate_up_TC, batch.lora, index, "gate_up")
        hidden_TF = self.kernels.silu_times_up(gate_up_TC)
        y_TD: Tensor = self.kernels.linear(hidden_TF, layer.down_DF)
        self._adapt(hidden_TF, y_TD, batch.lora, index, "down")
        return y_TD

    def _adapt(
        self, x_TD: Tensor, y_TC: Tensor, segments: Work[LoraSegment], layer: int, group: str
    ) -> None:
        """Add every adapter's part to the group's output, each to its own tokens, in place."""
        if segments:
            place = self.buffer.pages_NP, segments, layer, group
            shrunk = self.kernels.lora_shrink(x_TD, *place)
            self.kernels.lora_expand(shrunk, *place, y_TC)
