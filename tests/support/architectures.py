"""Names and shapes of the leaves of well-known models, as several libraries spell them.

A row of a table is one layer: its kind, then its name in each library. `{i}` and `{j}`
count from 0, `{i1}` and `{j1}` from 1. A name that ends in `!` has no bias there, and
`-` says that the library has no such layer.
"""

import random
import re


D, F, V, T, K = 8, 24, 31, 9, 4

_SPELLINGS = {
    "torch": dict(weight="weight", bias="bias", mean="running_mean", var="running_var"),
    "eqx": dict(weight="weight", bias="bias", mean="running_mean", var="running_var"),
    "flax": dict(weight="kernel", bias="bias", mean="mean", var="var"),
    "haiku": dict(weight="w", bias="b", mean="mean", var="var"),
}
_SCALES = {"flax": "scale", "haiku": "scale"}
_TABLES = {"flax": "embedding", "haiku": "embeddings"}

# Name: the libraries with their spellings, how many layers there are, and the rows.
TABLES = {
    "vit": (
        "torch torch torch eqx flax",
        lambda i: 1,
        """
        par(1,1,D) | vit.embeddings.cls_token | cls_token | cls_token | cls_token | cls
        par(1,T,D) | vit.embeddings.position_embeddings | pos_embed | pos_embedding | pos_embedding | Transformer.posembed_input.pos_embedding
        conv(D,3,4,4) | vit.embeddings.patch_embeddings.projection | patch_embed.proj | - | patch_embedding.proj | embedding
        norm(D) | vit.encoder.layer.{i}.layernorm_before | blocks.{i}.norm1 | transformer.layers.{i}.0.norm | blocks.{i}.norm1 | Transformer.encoderblock_{i}.LayerNorm_0
        norm(D) | vit.encoder.layer.{i}.layernorm_after | blocks.{i}.norm2 | transformer.layers.{i}.1.net.0 | blocks.{i}.norm2 | Transformer.encoderblock_{i}.LayerNorm_1
        lin(3*D,D) | - | blocks.{i}.attn.qkv | transformer.layers.{i}.0.to_qkv! | blocks.{i}.attn.qkv | -
        lin(D,D) | vit.encoder.layer.{i}.attention.attention.query | - | - | - | Transformer.encoderblock_{i}.MultiHeadDotProductAttention_0.query
        lin(D,D) | vit.encoder.layer.{i}.attention.attention.key | - | - | - | Transformer.encoderblock_{i}.MultiHeadDotProductAttention_0.key
        lin(D,D) | vit.encoder.layer.{i}.attention.attention.value | - | - | - | Transformer.encoderblock_{i}.MultiHeadDotProductAttention_0.value
        lin(D,D) | vit.encoder.layer.{i}.attention.output.dense | blocks.{i}.attn.proj | transformer.layers.{i}.0.to_out.0 | blocks.{i}.attn.proj | Transformer.encoderblock_{i}.MultiHeadDotProductAttention_0.out
        lin(F,D) | vit.encoder.layer.{i}.intermediate.dense | blocks.{i}.mlp.fc1 | transformer.layers.{i}.1.net.1 | blocks.{i}.fc1 | Transformer.encoderblock_{i}.MlpBlock_0.Dense_0
        lin(D,F) | vit.encoder.layer.{i}.output.dense | blocks.{i}.mlp.fc2 | transformer.layers.{i}.1.net.4 | blocks.{i}.fc2 | Transformer.encoderblock_{i}.MlpBlock_0.Dense_1
        norm(D) | vit.layernorm | norm | transformer.norm | norm | Transformer.encoder_norm
        lin(11,D) | classifier | head | mlp_head | head | head
        """,
    ),
    "resnet": (
        "torch torch torch eqx flax",
        lambda i: 2,
        """
        kern(8,3,7,7) | conv1 | resnet.embedder.embedder.convolution | conv1 | stem.conv | conv_init
        bn(8) | bn1 | resnet.embedder.embedder.normalization | bn1 | stem.norm | bn_init
        kern(8*2**i,8*2**max(i+j-1,0) if j == 0 else 8*2**i,3,3) | layer{i1}.{j}.conv1 | resnet.encoder.stages.{i}.layers.{j}.layer.0.convolution | layer{i1}.{j}.conv1 | stages.{i}.{j}.conv1 | -
        bn(8*2**i) | layer{i1}.{j}.bn1 | resnet.encoder.stages.{i}.layers.{j}.layer.0.normalization | layer{i1}.{j}.bn1 | stages.{i}.{j}.norm1 | -
        kern(8*2**i,8*2**i,3,3) | layer{i1}.{j}.conv2 | resnet.encoder.stages.{i}.layers.{j}.layer.1.convolution | layer{i1}.{j}.conv2 | stages.{i}.{j}.conv2 | -
        bn(8*2**i) | layer{i1}.{j}.bn2 | resnet.encoder.stages.{i}.layers.{j}.layer.1.normalization | layer{i1}.{j}.bn2 | stages.{i}.{j}.norm2 | -
        kern(8*2**i,8*2**max(i-1,0),1,1) | layer{i1}.0.downsample.0 | resnet.encoder.stages.{i}.layers.0.shortcut.convolution | layer{i1}.0.downsample.0 | stages.{i}.0.shortcut.conv | ResNetBlock_{i}.conv_proj
        bn(8*2**i) | layer{i1}.0.downsample.1 | resnet.encoder.stages.{i}.layers.0.shortcut.normalization | layer{i1}.0.downsample.1 | stages.{i}.0.shortcut.norm | ResNetBlock_{i}.norm_proj
        lin(11,32) | fc | classifier.1 | fc | head | Dense_0
        """,
    ),
    "t5": (
        "torch eqx eqx flax",
        lambda i: 1,
        """
        emb(V,D) | shared | embedding | shared | shared
        mat(D,D) | encoder.block.{i}.layer.0.SelfAttention.q | encoder.layers.{i}.attention.query | encoder.blocks.{i}.self_attn.q | encoder.block.{i}.layer.0.SelfAttention.q
        mat(D,D) | encoder.block.{i}.layer.0.SelfAttention.k | encoder.layers.{i}.attention.key | encoder.blocks.{i}.self_attn.k | encoder.block.{i}.layer.0.SelfAttention.k
        mat(D,D) | encoder.block.{i}.layer.0.SelfAttention.v | encoder.layers.{i}.attention.value | encoder.blocks.{i}.self_attn.v | encoder.block.{i}.layer.0.SelfAttention.v
        mat(D,D) | encoder.block.{i}.layer.0.SelfAttention.o | encoder.layers.{i}.attention.output | encoder.blocks.{i}.self_attn.o | encoder.block.{i}.layer.0.SelfAttention.o
        rms(D) | encoder.block.{i}.layer.0.layer_norm | encoder.layers.{i}.norm1 | encoder.blocks.{i}.attn_norm | encoder.block.{i}.layer.0.layer_norm
        mat(F,D) | encoder.block.{i}.layer.1.DenseReluDense.wi | encoder.layers.{i}.mlp.up | encoder.blocks.{i}.ff.wi | encoder.block.{i}.layer.1.DenseReluDense.wi
        mat(D,F) | encoder.block.{i}.layer.1.DenseReluDense.wo | encoder.layers.{i}.mlp.down | encoder.blocks.{i}.ff.wo | encoder.block.{i}.layer.1.DenseReluDense.wo
        rms(D) | encoder.block.{i}.layer.1.layer_norm | encoder.layers.{i}.norm2 | encoder.blocks.{i}.ff_norm | encoder.block.{i}.layer.1.layer_norm
        rms(D) | encoder.final_layer_norm | encoder.norm | encoder.final_norm | encoder.final_layer_norm
        mat(D,D) | decoder.block.{i}.layer.0.SelfAttention.q | decoder.layers.{i}.attention.query | decoder.blocks.{i}.self_attn.q | decoder.block.{i}.layer.0.SelfAttention.q
        mat(D,D) | decoder.block.{i}.layer.0.SelfAttention.v | decoder.layers.{i}.attention.value | decoder.blocks.{i}.self_attn.v | decoder.block.{i}.layer.0.SelfAttention.v
        rms(D) | decoder.block.{i}.layer.0.layer_norm | decoder.layers.{i}.norm1 | decoder.blocks.{i}.attn_norm | decoder.block.{i}.layer.0.layer_norm
        mat(D,D) | decoder.block.{i}.layer.1.EncDecAttention.q | decoder.layers.{i}.cross_attention.query | decoder.blocks.{i}.cross_attn.q | decoder.block.{i}.layer.1.EncDecAttention.q
        mat(D,D) | decoder.block.{i}.layer.1.EncDecAttention.v | decoder.layers.{i}.cross_attention.value | decoder.blocks.{i}.cross_attn.v | decoder.block.{i}.layer.1.EncDecAttention.v
        rms(D) | decoder.block.{i}.layer.1.layer_norm | decoder.layers.{i}.norm2 | decoder.blocks.{i}.cross_norm | decoder.block.{i}.layer.1.layer_norm
        mat(F,D) | decoder.block.{i}.layer.2.DenseReluDense.wi | decoder.layers.{i}.mlp.up | decoder.blocks.{i}.ff.wi | decoder.block.{i}.layer.2.DenseReluDense.wi
        rms(D) | decoder.block.{i}.layer.2.layer_norm | decoder.layers.{i}.norm3 | decoder.blocks.{i}.ff_norm | decoder.block.{i}.layer.2.layer_norm
        rms(D) | decoder.final_layer_norm | decoder.norm | decoder.final_norm | decoder.final_layer_norm
        """,
    ),
    "bert": (
        "torch eqx torch flax",
        lambda i: 1,
        """
        emb(V,D) | bert.embeddings.word_embeddings | embedder_block.token_embedder | embeddings.word_embeddings | bert.embeddings.word_embeddings
        emb(T,D) | bert.embeddings.position_embeddings | embedder_block.position_embedder | embeddings.position_embeddings | bert.embeddings.position_embeddings
        emb(2,D) | bert.embeddings.token_type_embeddings | embedder_block.segment_embedder | - | bert.embeddings.token_type_embeddings
        norm(D) | bert.embeddings.LayerNorm | embedder_block.layernorm | embeddings.LayerNorm | bert.embeddings.LayerNorm
        lin(D,D) | bert.encoder.layer.{i}.attention.self.query | layers.{i}.attention_block.attention.query_proj | transformer.layer.{i}.attention.q_lin | bert.encoder.layer.{i}.attention.self.query
        lin(D,D) | bert.encoder.layer.{i}.attention.self.key | layers.{i}.attention_block.attention.key_proj | transformer.layer.{i}.attention.k_lin | bert.encoder.layer.{i}.attention.self.key
        lin(D,D) | bert.encoder.layer.{i}.attention.self.value | layers.{i}.attention_block.attention.value_proj | transformer.layer.{i}.attention.v_lin | bert.encoder.layer.{i}.attention.self.value
        lin(D,D) | bert.encoder.layer.{i}.attention.output.dense | layers.{i}.attention_block.attention.output_proj | transformer.layer.{i}.attention.out_lin | bert.encoder.layer.{i}.attention.output.dense
        norm(D) | bert.encoder.layer.{i}.attention.output.LayerNorm | layers.{i}.attention_block.layernorm | transformer.layer.{i}.sa_layer_norm | bert.encoder.layer.{i}.attention.output.LayerNorm
        lin(F,D) | bert.encoder.layer.{i}.intermediate.dense | layers.{i}.ff_block.mlp | transformer.layer.{i}.ffn.lin1 | bert.encoder.layer.{i}.intermediate.dense
        lin(D,F) | bert.encoder.layer.{i}.output.dense | layers.{i}.ff_block.output | transformer.layer.{i}.ffn.lin2 | bert.encoder.layer.{i}.output.dense
        norm(D) | bert.encoder.layer.{i}.output.LayerNorm | layers.{i}.ff_block.layernorm | transformer.layer.{i}.output_layer_norm | bert.encoder.layer.{i}.output.LayerNorm
        lin(D,D) | bert.pooler.dense | pooler | - | bert.pooler.dense
        """,
    ),
    "gpt2": (
        "conv1d eqx torch flax",
        lambda i: 1,
        """
        emb(V,D) | transformer.wte | token_embedding | transformer.wte | wte
        emb(T,D) | transformer.wpe | position_embedding | transformer.wpe | wpe
        norm(D) | transformer.h.{i}.ln_1 | blocks.{i}.norm1 | transformer.h.{i}.ln_1 | h{i}.ln_1
        norm(D) | transformer.h.{i}.ln_2 | blocks.{i}.norm2 | transformer.h.{i}.ln_2 | h{i}.ln_2
        lin(3*D,D) | transformer.h.{i}.attn.c_attn | blocks.{i}.attn.qkv | transformer.h.{i}.attn.c_attn | h{i}.attn.c_attn
        lin(D,D) | transformer.h.{i}.attn.c_proj | blocks.{i}.attn.proj | transformer.h.{i}.attn.c_proj | h{i}.attn.c_proj
        lin(F,D) | transformer.h.{i}.mlp.c_fc | blocks.{i}.mlp.fc1 | transformer.h.{i}.mlp.c_fc | h{i}.mlp.c_fc
        lin(D,F) | transformer.h.{i}.mlp.c_proj | blocks.{i}.mlp.fc2 | transformer.h.{i}.mlp.c_proj | h{i}.mlp.c_proj
        norm(D) | transformer.ln_f | final_norm | transformer.ln_f | ln_f
        """,
    ),
    "llama": (
        "torch torch eqx flax",
        lambda i: 1,
        """
        emb(V,D) | model.embed_tokens | tok_embeddings | embedding | embedder
        mat(D,D) | model.layers.{i}.self_attn.q_proj | layers.{i}.attention.wq | blocks.{i}.attn.query | layer_{i}.attn.q
        mat(K,D) | model.layers.{i}.self_attn.k_proj | layers.{i}.attention.wk | blocks.{i}.attn.key | layer_{i}.attn.k
        mat(K,D) | model.layers.{i}.self_attn.v_proj | layers.{i}.attention.wv | blocks.{i}.attn.value | layer_{i}.attn.v
        mat(D,D) | model.layers.{i}.self_attn.o_proj | layers.{i}.attention.wo | blocks.{i}.attn.out | layer_{i}.attn.o
        mat(F,D) | model.layers.{i}.mlp.gate_proj | layers.{i}.feed_forward.w1 | blocks.{i}.mlp.gate | layer_{i}.mlp.gate
        mat(F,D) | model.layers.{i}.mlp.up_proj | layers.{i}.feed_forward.w3 | blocks.{i}.mlp.up | layer_{i}.mlp.up
        mat(D,F) | model.layers.{i}.mlp.down_proj | layers.{i}.feed_forward.w2 | blocks.{i}.mlp.down | layer_{i}.mlp.down
        rms(D) | model.layers.{i}.input_layernorm | layers.{i}.attention_norm | blocks.{i}.norm1 | layer_{i}.pre_attention_norm
        rms(D) | model.layers.{i}.post_attention_layernorm | layers.{i}.ffn_norm | blocks.{i}.norm2 | layer_{i}.pre_ffw_norm
        rms(D) | model.norm | norm | norm | final_norm
        mat(V,D) | lm_head | output | head | -
        """,
    ),
    "gemma": (
        "torch eqx flax",
        lambda i: 1,
        """
        emb(V,D) | model.embed_tokens | embedder | embedder.input_embedding
        mat(D,D) | model.layers.{i}.self_attn.q_proj | layers.{i}.attn.q | layer_{i}.attn.q_proj
        mat(K,D) | model.layers.{i}.self_attn.k_proj | layers.{i}.attn.k | layer_{i}.attn.k_proj
        mat(K,D) | model.layers.{i}.self_attn.v_proj | layers.{i}.attn.v | layer_{i}.attn.v_proj
        mat(D,D) | model.layers.{i}.self_attn.o_proj | layers.{i}.attn.o | layer_{i}.attn.o_proj
        rms(D) | model.layers.{i}.input_layernorm | layers.{i}.pre_attn_norm | layer_{i}.pre_attention_norm
        rms(D) | model.layers.{i}.post_attention_layernorm | layers.{i}.post_attn_norm | layer_{i}.post_attention_norm
        rms(D) | model.layers.{i}.pre_feedforward_layernorm | layers.{i}.pre_mlp_norm | layer_{i}.pre_ffw_norm
        rms(D) | model.layers.{i}.post_feedforward_layernorm | layers.{i}.post_mlp_norm | layer_{i}.post_ffw_norm
        mat(F,D) | model.layers.{i}.mlp.gate_proj | layers.{i}.mlp.gate | layer_{i}.mlp.gate_proj
        mat(F,D) | model.layers.{i}.mlp.up_proj | layers.{i}.mlp.up | layer_{i}.mlp.up_proj
        mat(D,F) | model.layers.{i}.mlp.down_proj | layers.{i}.mlp.down | layer_{i}.mlp.down_proj
        rms(D) | model.norm | norm | final_norm
        """,
    ),
    "mixtral": (
        "torch torch eqx",
        lambda i: 3,
        """
        emb(V,D) | model.embed_tokens | tok_embeddings | embedding
        mat(D,D) | model.layers.{i}.self_attn.q_proj | layers.{i}.attention.wq | layers.{i}.attn.q
        mat(K,D) | model.layers.{i}.self_attn.k_proj | layers.{i}.attention.wk | layers.{i}.attn.k
        mat(K,D) | model.layers.{i}.self_attn.v_proj | layers.{i}.attention.wv | layers.{i}.attn.v
        mat(D,D) | model.layers.{i}.self_attn.o_proj | layers.{i}.attention.wo | layers.{i}.attn.o
        mat(3,D) | model.layers.{i}.block_sparse_moe.gate | layers.{i}.feed_forward.gate | layers.{i}.moe.router
        mat(F,D) | model.layers.{i}.block_sparse_moe.experts.{j}.w1 | layers.{i}.feed_forward.experts.{j}.w1 | layers.{i}.moe.experts.{j}.gate
        mat(D,F) | model.layers.{i}.block_sparse_moe.experts.{j}.w2 | layers.{i}.feed_forward.experts.{j}.w2 | layers.{i}.moe.experts.{j}.down
        mat(F,D) | model.layers.{i}.block_sparse_moe.experts.{j}.w3 | layers.{i}.feed_forward.experts.{j}.w3 | layers.{i}.moe.experts.{j}.up
        rms(D) | model.layers.{i}.input_layernorm | layers.{i}.attention_norm | layers.{i}.attn_norm
        rms(D) | model.layers.{i}.post_attention_layernorm | layers.{i}.ffn_norm | layers.{i}.moe_norm
        rms(D) | model.norm | norm | norm
        mat(V,D) | lm_head | output | lm_head
        """,
    ),
    "whisper": (
        "torch torch eqx",
        lambda i: 1,
        """
        conv(D,5,3) | model.encoder.conv1 | encoder.conv1 | encoder.convs.0
        conv(D,D,3) | model.encoder.conv2 | encoder.conv2 | encoder.convs.1
        emb(T,D) | model.encoder.embed_positions | - | encoder.positions
        lin(D,D) | model.encoder.layers.{i}.self_attn.q_proj | encoder.blocks.{i}.attn.query | encoder.layers.{i}.attn.q
        mat(D,D) | model.encoder.layers.{i}.self_attn.k_proj | encoder.blocks.{i}.attn.key | encoder.layers.{i}.attn.k
        lin(D,D) | model.encoder.layers.{i}.self_attn.v_proj | encoder.blocks.{i}.attn.value | encoder.layers.{i}.attn.v
        lin(D,D) | model.encoder.layers.{i}.self_attn.out_proj | encoder.blocks.{i}.attn.out | encoder.layers.{i}.attn.out
        norm(D) | model.encoder.layers.{i}.self_attn_layer_norm | encoder.blocks.{i}.attn_ln | encoder.layers.{i}.attn_norm
        lin(F,D) | model.encoder.layers.{i}.fc1 | encoder.blocks.{i}.mlp.0 | encoder.layers.{i}.mlp.fc1
        lin(D,F) | model.encoder.layers.{i}.fc2 | encoder.blocks.{i}.mlp.2 | encoder.layers.{i}.mlp.fc2
        norm(D) | model.encoder.layers.{i}.final_layer_norm | encoder.blocks.{i}.mlp_ln | encoder.layers.{i}.mlp_norm
        norm(D) | model.encoder.layer_norm | encoder.ln_post | encoder.norm
        emb(V,D) | model.decoder.embed_tokens | decoder.token_embedding | decoder.embedding
        par(7,D) | model.decoder.embed_positions.weight | decoder.positional_embedding | decoder.positions
        lin(D,D) | model.decoder.layers.{i}.self_attn.q_proj | decoder.blocks.{i}.attn.query | decoder.layers.{i}.attn.q
        lin(D,D) | model.decoder.layers.{i}.self_attn.v_proj | decoder.blocks.{i}.attn.value | decoder.layers.{i}.attn.v
        norm(D) | model.decoder.layers.{i}.self_attn_layer_norm | decoder.blocks.{i}.attn_ln | decoder.layers.{i}.attn_norm
        lin(D,D) | model.decoder.layers.{i}.encoder_attn.q_proj | decoder.blocks.{i}.cross_attn.query | decoder.layers.{i}.cross_attn.q
        lin(D,D) | model.decoder.layers.{i}.encoder_attn.v_proj | decoder.blocks.{i}.cross_attn.value | decoder.layers.{i}.cross_attn.v
        norm(D) | model.decoder.layers.{i}.encoder_attn_layer_norm | decoder.blocks.{i}.cross_attn_ln | decoder.layers.{i}.cross_attn_norm
        lin(F,D) | model.decoder.layers.{i}.fc1 | decoder.blocks.{i}.mlp.0 | decoder.layers.{i}.mlp.fc1
        lin(D,F) | model.decoder.layers.{i}.fc2 | decoder.blocks.{i}.mlp.2 | decoder.layers.{i}.mlp.fc2
        norm(D) | model.decoder.layers.{i}.final_layer_norm | decoder.blocks.{i}.mlp_ln | decoder.layers.{i}.mlp_norm
        norm(D) | model.decoder.layer_norm | decoder.ln | decoder.norm
        """,
    ),
    "clip": (
        "torch torch eqx",
        lambda i: 1,
        """
        emb(V,D) | text_model.embeddings.token_embedding | token_embedding | text.token_embedding
        par(T,D) | text_model.embeddings.position_embedding.weight | positional_embedding | text.position_embedding
        lin(D,D) | text_model.encoder.layers.{i}.self_attn.q_proj | - | text.layers.{i}.attn.q
        lin(D,D) | text_model.encoder.layers.{i}.self_attn.k_proj | - | text.layers.{i}.attn.k
        lin(D,D) | text_model.encoder.layers.{i}.self_attn.v_proj | - | text.layers.{i}.attn.v
        lin(D,D) | text_model.encoder.layers.{i}.self_attn.out_proj | transformer.resblocks.{i}.attn.out_proj | text.layers.{i}.attn.out
        norm(D) | text_model.encoder.layers.{i}.layer_norm1 | transformer.resblocks.{i}.ln_1 | text.layers.{i}.norm1
        norm(D) | text_model.encoder.layers.{i}.layer_norm2 | transformer.resblocks.{i}.ln_2 | text.layers.{i}.norm2
        lin(F,D) | text_model.encoder.layers.{i}.mlp.fc1 | transformer.resblocks.{i}.mlp.c_fc | text.layers.{i}.mlp.fc1
        lin(D,F) | text_model.encoder.layers.{i}.mlp.fc2 | transformer.resblocks.{i}.mlp.c_proj | text.layers.{i}.mlp.fc2
        norm(D) | text_model.final_layer_norm | ln_final | text.norm
        kern(D,3,4,4) | vision_model.embeddings.patch_embedding | visual.conv1 | vision.patch_embedding
        norm(D) | vision_model.pre_layrnorm | visual.ln_pre | vision.pre_norm
        lin(D,D) | vision_model.encoder.layers.{i}.self_attn.out_proj | visual.transformer.resblocks.{i}.attn.out_proj | vision.layers.{i}.attn.out
        norm(D) | vision_model.encoder.layers.{i}.layer_norm1 | visual.transformer.resblocks.{i}.ln_1 | vision.layers.{i}.norm1
        norm(D) | vision_model.encoder.layers.{i}.layer_norm2 | visual.transformer.resblocks.{i}.ln_2 | vision.layers.{i}.norm2
        lin(F,D) | vision_model.encoder.layers.{i}.mlp.fc1 | visual.transformer.resblocks.{i}.mlp.c_fc | vision.layers.{i}.mlp.fc1
        lin(D,F) | vision_model.encoder.layers.{i}.mlp.fc2 | visual.transformer.resblocks.{i}.mlp.c_proj | vision.layers.{i}.mlp.fc2
        norm(D) | vision_model.post_layernorm | visual.ln_post | vision.post_norm
        par() | logit_scale | logit_scale | logit_scale
        mat(6,D) | text_projection | - | text_projection
        mat(6,D) | visual_projection | - | vision_projection
        """,
    ),
    "swin": (
        "torch torch eqx",
        lambda i: 2,
        """
        conv(8,3,4,4) | swin.embeddings.patch_embeddings.projection | patch_embed.proj | patch_embed.proj
        norm(8) | swin.embeddings.norm | patch_embed.norm | patch_embed.norm
        norm(8*2**i) | swin.encoder.layers.{i}.blocks.{j}.layernorm_before | layers.{i}.blocks.{j}.norm1 | stages.{i}.blocks.{j}.norm1
        lin(8*2**i,8*2**i) | swin.encoder.layers.{i}.blocks.{j}.attention.self.query | - | -
        lin(8*2**i,8*2**i) | swin.encoder.layers.{i}.blocks.{j}.attention.self.key | - | -
        lin(8*2**i,8*2**i) | swin.encoder.layers.{i}.blocks.{j}.attention.output.dense | layers.{i}.blocks.{j}.attn.proj | stages.{i}.blocks.{j}.attention.proj
        lin(24*2**i,8*2**i) | - | layers.{i}.blocks.{j}.attn.qkv | stages.{i}.blocks.{j}.attention.qkv
        par(9,2) | swin.encoder.layers.{i}.blocks.{j}.attention.self.relative_position_bias_table | layers.{i}.blocks.{j}.attn.relative_position_bias_table | stages.{i}.blocks.{j}.attention.relative_position_bias
        norm(8*2**i) | swin.encoder.layers.{i}.blocks.{j}.layernorm_after | layers.{i}.blocks.{j}.norm2 | stages.{i}.blocks.{j}.norm2
        lin(32*2**i,8*2**i) | swin.encoder.layers.{i}.blocks.{j}.intermediate.dense | layers.{i}.blocks.{j}.mlp.fc1 | stages.{i}.blocks.{j}.mlp.fc1
        lin(8*2**i,32*2**i) | swin.encoder.layers.{i}.blocks.{j}.output.dense | layers.{i}.blocks.{j}.mlp.fc2 | stages.{i}.blocks.{j}.mlp.fc2
        mat(16*2**i,32*2**i) | swin.encoder.layers.{i}.downsample.reduction | layers.{i}.downsample.reduction | stages.{i}.downsample.reduction
        norm(32*2**i) | swin.encoder.layers.{i}.downsample.norm | layers.{i}.downsample.norm | stages.{i}.downsample.norm
        norm(64) | swin.layernorm | norm | norm
        lin(11,64) | classifier | head | head
        """,
    ),
    "convnext": (
        "torch torch eqx flax",
        lambda i: 2,
        """
        conv(8,3,4,4) | downsample_layers.0.0 | convnext.embeddings.patch_embeddings | stem.conv | stem_conv
        norm(8) | downsample_layers.0.1 | convnext.embeddings.layernorm | stem.norm | stem_norm
        conv(8*2**i,1,7,7) | stages.{i}.{j}.dwconv | convnext.encoder.stages.{i}.layers.{j}.dwconv | stages.{i}.blocks.{j}.dwconv | stages_{i}.blocks_{j}.dwconv
        norm(8*2**i) | stages.{i}.{j}.norm | convnext.encoder.stages.{i}.layers.{j}.layernorm | stages.{i}.blocks.{j}.norm | stages_{i}.blocks_{j}.norm
        lin(32*2**i,8*2**i) | stages.{i}.{j}.pwconv1 | convnext.encoder.stages.{i}.layers.{j}.pwconv1 | stages.{i}.blocks.{j}.pwconv1 | stages_{i}.blocks_{j}.pwconv1
        lin(8*2**i,32*2**i) | stages.{i}.{j}.pwconv2 | convnext.encoder.stages.{i}.layers.{j}.pwconv2 | stages.{i}.blocks.{j}.pwconv2 | stages_{i}.blocks_{j}.pwconv2
        par(8*2**i) | stages.{i}.{j}.gamma | convnext.encoder.stages.{i}.layers.{j}.layer_scale_parameter | stages.{i}.blocks.{j}.gamma | stages_{i}.blocks_{j}.gamma
        norm(32) | norm | convnext.layernorm | norm | norm
        lin(11,32) | head | classifier | head | head
        """,
    ),
    "unet": (
        "torch torch eqx flax",
        lambda i: 2,
        """
        conv(8,3,3,3) | conv_in | input_blocks.0.0 | conv_in | conv_in
        lin(32,8) | time_embedding.linear_1 | time_embed.0 | time.linear1 | time_embedding.linear_1
        lin(32,32) | time_embedding.linear_2 | time_embed.2 | time.linear2 | time_embedding.linear_2
        norm(8*2**i) | down_blocks.{i}.resnets.{j}.norm1 | - | down.{i}.resnets.{j}.norm1 | down_blocks_{i}.resnets_{j}.norm1
        conv(8*2**i,8*2**i,3,3) | down_blocks.{i}.resnets.{j}.conv1 | - | down.{i}.resnets.{j}.conv1 | down_blocks_{i}.resnets_{j}.conv1
        lin(8*2**i,32) | down_blocks.{i}.resnets.{j}.time_emb_proj | - | down.{i}.resnets.{j}.time_proj | down_blocks_{i}.resnets_{j}.time_emb_proj
        norm(8*2**i) | down_blocks.{i}.resnets.{j}.norm2 | - | down.{i}.resnets.{j}.norm2 | down_blocks_{i}.resnets_{j}.norm2
        conv(8*2**i,8*2**i,3,3) | down_blocks.{i}.resnets.{j}.conv2 | - | down.{i}.resnets.{j}.conv2 | down_blocks_{i}.resnets_{j}.conv2
        conv(8*2**i,8*2**i,3,3) | down_blocks.{i}.downsamplers.0.conv | - | down.{i}.downsample.conv | down_blocks_{i}.downsamplers_0.conv
        norm(8*2**i) | up_blocks.{i}.resnets.{j}.norm1 | - | up.{i}.resnets.{j}.norm1 | up_blocks_{i}.resnets_{j}.norm1
        conv(8*2**i,8*2**i,3,3) | up_blocks.{i}.resnets.{j}.conv1 | - | up.{i}.resnets.{j}.conv1 | up_blocks_{i}.resnets_{j}.conv1
        conv(8*2**i,8*2**i,3,3) | up_blocks.{i}.resnets.{j}.conv2 | - | up.{i}.resnets.{j}.conv2 | up_blocks_{i}.resnets_{j}.conv2
        norm(32) | mid_block.resnets.{j}.norm1 | - | mid.resnets.{j}.norm1 | mid_block.resnets_{j}.norm1
        conv(32,32,3,3) | mid_block.resnets.{j}.conv1 | - | mid.resnets.{j}.conv1 | mid_block.resnets_{j}.conv1
        norm(32) | mid_block.attentions.0.group_norm | - | mid.attention.norm | mid_block.attentions_0.group_norm
        mat(32,32) | mid_block.attentions.0.to_q | - | mid.attention.q | mid_block.attentions_0.to_q
        mat(32,32) | mid_block.attentions.0.to_k | - | mid.attention.k | mid_block.attentions_0.to_k
        mat(32,32) | mid_block.attentions.0.to_v | - | mid.attention.v | mid_block.attentions_0.to_v
        lin(32,32) | mid_block.attentions.0.to_out.0 | - | mid.attention.out | mid_block.attentions_0.to_out_0
        norm(8) | conv_norm_out | out.0 | norm_out | conv_norm_out
        conv(3,8,3,3) | conv_out | out.2 | conv_out | conv_out
        """,
    ),
    "critics": (
        "torch torch eqx haiku",
        lambda i: 2,
        """
        lin(16,6) | q{j1}.0 | critic.qf{j}.0 | critics.{j}.layers.0 | q{j1}.linear
        lin(16,16) | q{j1}.2 | critic.qf{j}.2 | critics.{j}.layers.1 | q{j1}.linear_1
        lin(1,16) | q{j1}.4 | critic.qf{j}.4 | critics.{j}.layers.2 | q{j1}.linear_2
        lin(16,6) | target_q{j1}.0 | critic_target.qf{j}.0 | target_critics.{j}.layers.0 | target_q{j1}.linear
        lin(16,16) | target_q{j1}.2 | critic_target.qf{j}.2 | target_critics.{j}.layers.1 | target_q{j1}.linear_1
        lin(1,16) | target_q{j1}.4 | critic_target.qf{j}.4 | target_critics.{j}.layers.2 | target_q{j1}.linear_2
        lin(16,5) | pi.0 | actor.latent_pi.0 | actor.layers.0 | pi.linear
        lin(16,16) | pi.2 | actor.latent_pi.2 | actor.layers.1 | pi.linear_1
        lin(2,16) | pi.mu | actor.mu | actor.mean | pi.mean
        lin(2,16) | pi.log_std | actor.log_std | actor.log_std | pi.log_std
        """,
    ),
    "mamba": (
        "torch torch eqx",
        lambda i: 1,
        """
        emb(V,D) | backbone.embeddings | backbone.embedding | embedding
        mat(32,D) | backbone.layers.{i}.mixer.in_proj | backbone.layers.{i}.mixer.in_proj | layers.{i}.mixer.in_proj
        conv(16,1,4) | backbone.layers.{i}.mixer.conv1d | backbone.layers.{i}.mixer.conv1d | layers.{i}.mixer.conv
        mat(9,16) | backbone.layers.{i}.mixer.x_proj | backbone.layers.{i}.mixer.x_proj | layers.{i}.mixer.x_proj
        lin(16,1) | backbone.layers.{i}.mixer.dt_proj | backbone.layers.{i}.mixer.dt_proj | layers.{i}.mixer.dt_proj
        par(16,4) | backbone.layers.{i}.mixer.A_log | backbone.layers.{i}.mixer.A_log | layers.{i}.mixer.a_log
        par(16) | backbone.layers.{i}.mixer.D | backbone.layers.{i}.mixer.D | layers.{i}.mixer.d
        mat(D,16) | backbone.layers.{i}.mixer.out_proj | backbone.layers.{i}.mixer.out_proj | layers.{i}.mixer.out_proj
        rms(D) | backbone.layers.{i}.norm | backbone.layers.{i}.norm | layers.{i}.norm
        rms(D) | backbone.norm_f | backbone.norm_f | norm
        mat(V,D) | lm_head | lm_head | head
        """,
    ),
    "mlp": (
        "torch torch eqx flax haiku",
        lambda i: 1,
        """
        lin(16,6) | fc1 | net.0 | layers.0 | Dense_0 | mlp.linear
        lin(16,16) | fc2 | net.2 | layers.1 | Dense_1 | mlp.linear_1
        lin(16,16) | fc3 | net.4 | layers.2 | Dense_2 | mlp.linear_2
        lin(3,16) | fc4 | net.6 | layers.3 | Dense_3 | mlp.linear_3
        """,
    ),
    "cnn": (
        "torch torch eqx flax haiku",
        lambda i: 1,
        """
        conv(8,3,3,3) | conv1 | features.0 | convs.0 | Conv_0 | conv2_d
        norm(8) | conv1_BN | features.1 | norms.0 | LayerNorm_0 | layer_norm
        conv(8,8,3,3) | conv2 | features.3 | convs.1 | Conv_1 | conv2_d_1
        norm(8) | conv2_BN | features.4 | norms.1 | LayerNorm_1 | layer_norm_1
        lin(11,8) | fc | classifier | head | Dense_0 | linear
        """,
    ),
}


def _leaves(kind, sizes, name, style):
    """The leaves of one layer, each with what it is called in all libraries."""
    name, has_bias = name.removesuffix("!"), not name.endswith("!")
    base = "torch" if style == "conv1d" else style
    words = dict(_SPELLINGS[base])
    if kind == "par":
        return {"": (name, tuple(sizes))}
    shape = tuple(sizes)
    if kind in ("norm", "rms", "bn"):
        words["weight"] = _SCALES.get(style, "weight")
        words["bias"] = "offset" if style == "haiku" else words["bias"]
    elif kind == "emb":
        words["weight"] = _TABLES.get(style, "weight")
    elif style in ("flax", "haiku") or (style == "conv1d" and kind in ("lin", "mat")):
        shape = (*shape[2:], shape[1], shape[0])
    out = {"weight": (f"{name}.{words['weight']}", shape)}
    if kind in ("lin", "conv", "norm", "bn") and has_bias:
        axes = (1,) * (len(shape) - 2) if style == "eqx" and kind == "conv" else ()
        out["bias"] = f"{name}.{words['bias']}", (sizes[0], *axes)
    if kind == "bn":
        out |= {x: (f"{name}.{words[x]}", shape) for x in ("mean", "var")}
    return out


def spelled(table, library, layers=3):
    """The leaves of a model as a library has them: its shape, by what it is. And the
    rows whose names have numbers that count no layers."""
    styles, inner, rows = TABLES[table]
    out, numbered = {}, set()
    for number, row in enumerate(x.strip() for x in rows.strip().splitlines()):
        kind, *names = (x.strip() for x in row.split("|"))
        name = names[library]
        plain = re.sub(r"{\w+}", "", name)
        if re.search(r"\d", plain) or styles.split()[library] == "haiku":
            numbered.add(number)
        if name == "-":
            continue
        call, _, sizes = kind.rstrip(")").partition("(")
        one = any("{i" in x for x in names)
        for i in range(layers if one else 1):
            for j in range(inner(i) if any("{j" in x for x in names) else 1):
                scope = dict(D=D, F=F, V=V, T=T, K=K, i=i, j=j, max=max)
                dims = eval(f"({sizes},)" if sizes else "()", scope)
                full = name.format(i=i, j=j, i1=i + 1, j1=j + 1)
                style = styles.split()[library]
                for role, leaf in _leaves(call, dims, full, style).items():
                    out[number, i, j, role] = leaf
    return out, numbered


def _renumbered(leaves, rng):
    """With other numbers where some count: from 1, from 0, or with others between."""
    values = {}
    for name, _ in leaves.values():
        parts = re.split(r"(\d+)", name)
        for at in range(1, len(parts), 2):
            key = "".join(parts[:at])
            values.setdefault(key, set()).add(int(parts[at]))
    # One way for all that have the same name but for the numbers before.
    fold = lambda x: re.sub(r"\d+", "*", x)
    seen = {}
    for key, some in values.items():
        seen.setdefault(fold(key), []).append(some)
    ways = {}
    for key, some in seen.items():
        least = min(map(min, some))
        ways[key] = rng.choice([0, 0, 1 - 2 * least if least < 2 else 0, 7])
    named = {}
    for what, (name, shape) in leaves.items():
        parts = re.split(r"(\d+)", name)
        new = list(parts)
        for at in range(1, len(parts), 2):
            key = fold("".join(parts[:at]))
            # Haiku leaves out the first number.
            several = len(max(seen[key], key=len)) > 1 and not key.endswith("_")
            number, way = int(parts[at]), ways[key]
            apart = key.endswith(".") and not parts[at + 1].startswith("_")
            if several and way == 7 and apart and min(map(min, seen[key])) == 0:
                new[at] = str(2 * number)
            elif several and way in (1, -1):
                new[at] = str(number + way)
        named[what] = "".join(new), shape
    return named


_WRAPS = [
    "",
    "",
    "model.",
    "module.",
    "net.",
    "state_dict.",
    "params.",
    "model.0.",
    "policy.",
]
_LONGER = {
    "attn": "attention",
    "norm": "layernorm",
    "emb": "embedding",
    "conv": "convolution",
    "mlp": "feed_forward",
    "proj": "projection",
    "embed": "embeddings",
    "fc": "linear",
    "layers": "blocks",
    "blocks": "layers",
    "h": "layers",
    "out": "output",
}


def _renamed(leaves, rng):
    """With other words for the same things."""
    chosen = {x for x in _LONGER if rng.random() < 0.25}
    some = lambda m: _LONGER[m[0]] if m[0] in chosen else m[0]
    new = {
        what: (re.sub(r"(?<![A-Za-z])[a-z]+(?![A-Za-z])", some, name), shape)
        for what, (name, shape) in leaves.items()
    }
    names = [x for x, _ in new.values()]
    return new if len({*names}) == len(names) else leaves


def case(seed):
    """Names with shapes of two spellings of one model, and which are the same."""
    rng = random.Random(seed)
    table = rng.choice(sorted(TABLES))
    count = len(TABLES[table][0].split())
    both = [rng.randrange(count), rng.randrange(count)]
    layers = rng.choice([1, 2, 3, 3, 3])
    fewer = layers - 1 if layers > 1 and rng.random() < 0.1 else layers
    sides, numbered = [], set()
    for library, n in zip(both, rng.sample([layers, fewer], 2)):
        leaves, some = spelled(table, library, n)
        numbered |= some
        if rng.random() < 0.6:
            leaves = _renumbered(leaves, rng)
        if rng.random() < 0.5:
            leaves = _renamed(leaves, rng)
        sides.append(leaves)
    for leaves in sides:
        rows = sorted({x[0] for x in leaves} - numbered)
        if rng.random() < 0.3 and len(rows) > 2:
            gone = rng.choice(rows)
            for what in [x for x in leaves if x[0] == gone]:
                del leaves[what]
    shapes = []
    for leaves in sides:
        wrap = rng.choice(_WRAPS)
        items = [(what, (wrap + name, shape)) for what, (name, shape) in leaves.items()]
        rng.shuffle(items)
        shapes.append(dict(items))
    a, b = shapes
    truth = {name: b[what][0] for what, (name, _) in a.items() if what in b}
    label = f"{table} {both} seed {seed}"
    return (
        label,
        *({name: ("array of f", s) for name, s in x.values()} for x in (a, b)),
        truth,
    )
