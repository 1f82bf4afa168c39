//! Reads a model's KV cache from its config.json.

use anyhow::{Result, anyhow, bail};
use clap::ValueEnum;
use serde_json::Value;

/// Data types of caches by vLLM's names: those whose elements have whole bytes and need nothing stored beside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CacheDtype {
    Auto,
    Bfloat16,
    Float16,
    Float32,
    #[value(name = "fp8", aliases = ["fp8_e4m3", "fp8_e5m2"])]
    Fp8,
}

/// Data types of the matrices in states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum StateDtype {
    Auto,
    Bfloat16,
    Float16,
    Float32,
}

/// The facts of a model's cache that do not depend on the number of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cache {
    /// The model's name in the output.
    pub(super) model: String,
    pub(super) layer: Layer,
    /// Layers that look back to the first token.
    pub(super) full_layers: u64,
    /// Layers that look back `window` tokens, or in a chunk of so many.
    pub(super) sliding_layers: u64,
    /// Tokens; 0 if no layer slides.
    pub(super) window: u64,
    /// Whether these layers see the chunk in which a token stands, and not the tokens before it.
    pub(super) is_chunk: bool,
    /// Layers that keep a state of all tokens so far instead of each token.
    pub(super) states: Option<States>,
    pub(super) element_bytes: u64,
    pub(super) dtype: String,
    /// Assumptions, a sentence each.
    pub(super) notes: Vec<String>,
}

/// The cache of one token in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layer {
    /// A key and a value for each KV head.
    Heads { kv_heads: u64, head_dim: u64 },
    /// One latent vector and one key for the position, shared by all heads.
    Latent { rank: u64, rope: u64 },
    /// The same, and a key of an indexer that chooses tokens: bytes with a scale for each 128 of them. In fp8 the latent vector
    /// has such scales, too, and the key for the position 16 bits.
    Indexed { rank: u64, rope: u64, index: u64 },
}

impl Layer {
    /// Bytes of one token; None if they exceed a `u64`.
    pub(super) fn bytes(self, element: u64) -> Option<u64> {
        match self {
            Self::Heads { kv_heads, head_dim } => {
                2u64.checked_mul(kv_heads)?.checked_mul(head_dim)?.checked_mul(element)
            }
            Self::Latent { rank, rope } => rank.checked_add(rope)?.checked_mul(element),
            Self::Indexed { rank, rope, index } => {
                let latent = match element {
                    1 => with_scales(rank)?.checked_add(rope.checked_mul(2)?)?,
                    _ => rank.checked_add(rope)?.checked_mul(element)?,
                };
                latent.checked_add(with_scales(index)?)
            }
        }
    }
}

/// Layers whose state is the last inputs of a convolution and a matrix for each head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct States {
    pub(super) layers: u64,
    /// Channels of the convolution, and the inputs of each that it still needs.
    pub(super) channels: u64,
    pub(super) inputs: u64,
    pub(super) heads: u64,
    /// Rows and columns of a head's matrix.
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Bytes of an input, and of a matrix's number.
    pub(super) input_bytes: u64,
    pub(super) matrix_bytes: u64,
}

impl States {
    /// Bytes of one layer's state; None if they exceed a `u64`.
    pub(super) fn layer_bytes(&self) -> Option<u64> {
        let inputs = self.channels.checked_mul(self.inputs)?.checked_mul(self.input_bytes)?;
        let numbers = self.heads.checked_mul(self.rows)?.checked_mul(self.columns)?;
        inputs.checked_add(numbers.checked_mul(self.matrix_bytes)?)
    }

    /// Bytes of all layers' states at one token.
    pub(super) fn bytes(&self) -> Option<u64> {
        self.layers.checked_mul(self.layer_bytes()?)
    }
}

/// Bytes with their scales: four more for each 128.
fn with_scales(bytes: u64) -> Option<u64> {
    bytes.checked_add(bytes.div_ceil(128).checked_mul(4)?)
}

/// Keys, with any value but null, false, 0 or an empty list, of models whose layers do not all keep the same, or keep what
/// these formulas do not know: states, indexes, other heads in some layers.
const NOT_COVERED: [&str; 29] = [
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_offset",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "full_attention_interval",
    "global_head_dim",
    "hidden_size_per_head",
    "hybrid_override_pattern",
    "index_head_dim",
    "index_topk",
    "is_encoder_decoder",
    "layer_group_size",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_state",
    "multi_query",
    "multi_query_group_num",
    "num_attention_groups",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "swa_num_key_value_heads",
];

/// Models whose latent cache vLLM keeps as the formula says, once a layer.
const LATENT_MODELS: [&str; 5] =
    ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe"];
/// The model with an indexer beside its latent cache, and the one whose layers see chunks.
const INDEXED_MODEL: &str = "deepseek_v32";
const CHUNKED_MODEL: &str = "llama4_text";
/// The models with linear attention, and with Mamba 2, beside full attention.
const LINEAR_MODEL: &str = "qwen3_next";
const MAMBA_MODEL: &str = "granitemoehybrid";
/// Models whose layers all slide if `sliding_window` is set.
const ALL_SLIDE: [&str; 4] = ["mistral", "mixtral", "phi3", "starcoder2"];

impl Cache {
    /// Reads the config. The error says what is missing in it, or what of it is not covered.
    pub(super) fn of(config: &Value, asked: CacheDtype, of_states: StateDtype) -> Result<Self> {
        if !config.is_object() {
            bail!("it is no JSON object; name the config.json of a model");
        }
        // Models that also see or hear have their language model's config inside.
        let text = config.get("text_config").filter(|inner| inner.is_object()).unwrap_or(config);
        let kind = name(text, "model_type").or(name(config, "model_type")).unwrap_or_default();
        let architecture = config["architectures"][0].as_str().unwrap_or("an unnamed architecture");
        let covered: &[&str] = match kind {
            CHUNKED_MODEL => &["attention_chunk_size"],
            INDEXED_MODEL => &["index_head_dim", "index_topk"],
            LINEAR_MODEL => &["full_attention_interval", "linear_num_key_heads"],
            MAMBA_MODEL => &["mamba_d_state"],
            _ => &[],
        };
        let is_other = |key: &&&str| is_set(&text[**key]) && !covered.contains(*key);
        if let Some(key) = NOT_COVERED.iter().find(is_other) {
            bail!(
                "'{key}' says that not all layers of {architecture} keep a key and a value of the same size for each token; \
                 `kvlane size` does not know by which rule. vLLM's log tells the size of its cache and its tokens: divide them"
            );
        }
        let mut notes = Vec::new();
        let layers = number(text, "num_hidden_layers")?;
        let layer = layer(text, kind, &mut notes)?;
        let is_chunk = kind == CHUNKED_MODEL;
        let (element_bytes, dtype) = element(config, text, asked, &mut notes)?;
        let states = states(text, kind, layers, asked, of_states)?;
        let (full_layers, sliding_layers, window) = match states {
            Some(states) => (layers - states.layers, 0, 0),
            None if is_chunk => split_chunks(text, layers)?,
            None => split_layers(text, kind, layers)?,
        };
        let model = if kind.is_empty() { architecture.into() } else { format!("{architecture} ({kind})") };
        let cache = Self {
            model,
            layer,
            full_layers,
            sliding_layers,
            window,
            is_chunk,
            states,
            element_bytes,
            dtype,
            notes,
        };
        let bytes = layer.bytes(element_bytes).and_then(|bytes| bytes.checked_mul(layers));
        bytes
            .and(states.map_or(Some(0), |states| states.bytes()))
            .map(|_| cache)
            .ok_or_else(|| anyhow!("its numbers are too large: more than 2^64 bytes a token"))
    }

    /// Layers that keep something of each token.
    pub(super) fn layers(&self) -> u64 {
        self.full_layers + self.sliding_layers
    }

    /// Bytes of one token in all layers. [`Self::of`] has checked that they fit a `u64`.
    pub(super) fn token_bytes(&self) -> u64 {
        self.layer.bytes(self.element_bytes).unwrap_or(u64::MAX).saturating_mul(self.layers())
    }
}

fn name<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    config.get(key).and_then(Value::as_str)
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(set) => *set,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(_) => true,
    }
}

/// A number above 0 that has to be there.
fn number(config: &Value, key: &str) -> Result<u64> {
    optional(config, key)?.ok_or_else(|| {
        anyhow!("it has no '{key}', so it is not the config of a model whose cache `kvlane size` can tell")
    })
}

/// A number above 0; None if the key is missing.
fn optional(config: &Value, key: &str) -> Result<Option<u64>> {
    match &config[key] {
        Value::Null => Ok(None),
        value => match value.as_u64() {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => bail!("'{key}' is {value}, and not a whole number above 0"),
        },
    }
}

fn layer(text: &Value, kind: &str, notes: &mut Vec<String>) -> Result<Layer> {
    if let Some(rank) = optional(text, "kv_lora_rank")? {
        if kind == INDEXED_MODEL {
            let (rope, index) = (number(text, "qk_rope_head_dim")?, number(text, "index_head_dim")?);
            return Ok(Layer::Indexed { rank, rope, index });
        }
        if !LATENT_MODELS.contains(&kind) {
            bail!(
                "'kv_lora_rank' says that it has latent attention, but of the model type '{kind}' `kvlane size` does not know \
                 how vLLM keeps its cache; known are {}",
                LATENT_MODELS.join(", ")
            );
        }
        return Ok(Layer::Latent { rank, rope: number(text, "qk_rope_head_dim")? });
    }
    let heads = number(text, "num_attention_heads")?;
    let head_dim = match optional(text, "head_dim")? {
        Some(head_dim) => head_dim,
        None => {
            let hidden = number(text, "hidden_size")?;
            if hidden % heads != 0 {
                bail!(
                    "it has no 'head_dim', and 'hidden_size' {hidden} is no multiple of 'num_attention_heads' {heads}"
                );
            }
            hidden / heads
        }
    };
    if let Some(value_dim) = optional(text, "v_head_dim")?.filter(|value_dim| *value_dim != head_dim) {
        bail!(
            "its values have 'v_head_dim' {value_dim} and its keys {head_dim}: `kvlane size` does not know that cache"
        );
    }
    let kv_heads = match optional(text, "num_key_value_heads")?.or(optional(text, "num_kv_heads")?) {
        Some(kv_heads) => kv_heads,
        None => {
            notes.push(format!(
                "the config has no 'num_key_value_heads': each of the {heads} attention heads has a key and a value, as vLLM \
                 takes it"
            ));
            heads
        }
    };
    Ok(Layer::Heads { kv_heads, head_dim })
}

/// Layers that look back to the first token, those that see a chunk, and its tokens.
fn split_chunks(text: &Value, layers: u64) -> Result<(u64, u64, u64)> {
    let Some(chunk) = optional(text, "attention_chunk_size")? else { return Ok((layers, 0, 0)) };
    // Layers without positions see all tokens. If the list is empty, these are one of four.
    let full = match text["no_rope_layers"].as_array().filter(|list| !list.is_empty()) {
        Some(list) if list.len() as u64 != layers => {
            bail!("'no_rope_layers' names {} layers, and 'num_hidden_layers' {layers}", list.len())
        }
        Some(list) => list.iter().filter(|each| each.as_u64() == Some(0)).count() as u64,
        None => layers / optional(text, "no_rope_layer_interval")?.unwrap_or(4),
    };
    Ok((full, layers - full, chunk))
}

/// The states of a model that has them. The formulas are those of vLLM's `get_mamba_state_shape_from_config` and
/// `get_mamba_state_dtype_from_config` for these models, without tensor parallelism.
fn states(
    text: &Value,
    kind: &str,
    layers: u64,
    cache: CacheDtype,
    matrix: StateDtype,
) -> Result<Option<States>> {
    let (word, interval) = match kind {
        LINEAR_MODEL => ("linear_attention", optional(text, "full_attention_interval")?),
        MAMBA_MODEL => ("mamba", None),
        _ => return Ok(None),
    };
    let with_states = match (text["layer_types"].as_array(), interval) {
        (Some(types), _) if types.len() as u64 != layers => {
            bail!("'layer_types' names {} layers, and 'num_hidden_layers' {layers}", types.len())
        }
        (Some(types), _) => types.iter().filter(|each| each.as_str() == Some(word)).count() as u64,
        (None, Some(interval)) => layers - layers / interval,
        (None, None) => bail!("it has no 'layer_types', so nothing says which layers keep states"),
    };
    if with_states == 0 {
        return Ok(None);
    }
    // States have the model's data type, whatever the cache has.
    let input_bytes = if cache == CacheDtype::Float32 { 4 } else { 2 };
    let matrix_bytes = match matrix {
        StateDtype::Auto => input_bytes,
        StateDtype::Bfloat16 | StateDtype::Float16 => 2,
        StateDtype::Float32 => 4,
    };
    let product = |a: u64, b: u64| {
        a.checked_mul(b).ok_or_else(|| anyhow!("its numbers are too large: more than 2^64 channels"))
    };
    let kernel = |key| number(text, key).map(|kernel| kernel - 1);
    Ok(Some(if kind == LINEAR_MODEL {
        let (keys, heads) = (number(text, "linear_num_key_heads")?, number(text, "linear_num_value_heads")?);
        let (columns, rows) = (number(text, "linear_key_head_dim")?, number(text, "linear_value_head_dim")?);
        // Queries and keys have the same heads.
        let channels = product(2, product(keys, columns)?)?.saturating_add(product(heads, rows)?);
        let inputs = kernel("linear_conv_kernel_dim")?;
        States { layers: with_states, channels, inputs, heads, rows, columns, input_bytes, matrix_bytes }
    } else {
        let columns = number(text, "mamba_d_state")?;
        let of_groups = product(2, product(number(text, "mamba_n_groups")?, columns)?)?;
        let inner = product(number(text, "mamba_expand")?, number(text, "hidden_size")?)?;
        States {
            layers: with_states,
            channels: inner.saturating_add(of_groups),
            inputs: kernel("mamba_d_conv")?,
            heads: number(text, "mamba_n_heads")?,
            rows: number(text, "mamba_d_head")?,
            columns,
            input_bytes,
            matrix_bytes,
        }
    }))
}

/// Layers that look back to the first token, those that slide, and their window.
fn split_layers(text: &Value, kind: &str, layers: u64) -> Result<(u64, u64, u64)> {
    let window = match &text["sliding_window"] {
        // For vLLM 0 means no window.
        Value::Number(number) if number.as_u64() == Some(0) => None,
        _ => optional(text, "sliding_window")?,
    };
    let window = window.filter(|_| text["use_sliding_window"].as_bool() != Some(false));
    let sliding = match text["layer_types"].as_array() {
        Some(types) => {
            if types.len() as u64 != layers {
                bail!("'layer_types' names {} layers, and 'num_hidden_layers' {layers}", types.len());
            }
            let is = |word: &str| types.iter().filter(|each| each.as_str() == Some(word)).count() as u64;
            let (full, sliding) = (is("full_attention"), is("sliding_attention"));
            if full + sliding != layers {
                let is_other =
                    |each: &&Value| !matches!(each.as_str(), Some("full_attention" | "sliding_attention"));
                let other = types.iter().find(is_other).map(ToString::to_string).unwrap_or_default();
                bail!(
                    "'layer_types' has {other}, of which `kvlane size` does not know what it keeps of a token; it knows \
                     full_attention and sliding_attention"
                );
            }
            sliding
        }
        None => match (window, optional(text, "sliding_window_pattern")?) {
            (None, _) => 0,
            // One of each `pattern` layers looks back to the first token.
            (Some(_), Some(pattern)) => layers - layers / pattern,
            (Some(_), None) if kind == "gemma2" => layers - layers / 2,
            (Some(_), None) if ALL_SLIDE.contains(&kind) => layers,
            (Some(window), None) => bail!(
                "'sliding_window' is {window}, but nothing says which layers slide: neither 'layer_types' nor \
                 'sliding_window_pattern' is there, and of the model type '{kind}' it is not known"
            ),
        },
    };
    match window {
        _ if sliding == 0 => Ok((layers, 0, 0)),
        Some(window) => Ok((layers - sliding, sliding, window)),
        None => bail!("'layer_types' says that {sliding} layers slide, but there is no 'sliding_window'"),
    }
}

/// Bytes of an element, and its name.
fn element(
    config: &Value,
    text: &Value,
    asked: CacheDtype,
    notes: &mut Vec<String>,
) -> Result<(u64, String)> {
    Ok(match asked {
        CacheDtype::Bfloat16 => (2, "bfloat16".into()),
        CacheDtype::Float16 => (2, "float16".into()),
        CacheDtype::Float32 => (4, "float32".into()),
        CacheDtype::Fp8 => (1, "fp8".into()),
        CacheDtype::Auto => {
            let quantized = &config["quantization_config"];
            if let Some(key) =
                ["kv_cache_scheme", "kv_cache_quant_algo"].into_iter().find(|key| is_set(&quantized[*key]))
            {
                bail!(
                    "'quantization_config' has '{key}': vLLM may keep the cache in fewer bytes than the model's. Say in which: \
                     --kv-cache-dtype fp8 or bfloat16"
                );
            }
            let said = ["dtype", "torch_dtype"]
                .into_iter()
                .find_map(|key| name(text, key).or_else(|| name(config, key)));
            match said {
                Some(said @ ("bfloat16" | "float16")) => (2, said.into()),
                Some("float32") => {
                    notes.push(
                        "the weights are float32, which vLLM turns into 16 bits unless it is told --dtype float32: then add \
                         --kv-cache-dtype float32 here"
                            .into(),
                    );
                    (2, "16 bits".into())
                }
                Some(other) => bail!("its dtype is '{other}': say --kv-cache-dtype bfloat16, float16 or fp8"),
                None => bail!(
                    "it has neither 'dtype' nor 'torch_dtype': say --kv-cache-dtype bfloat16, float16 or fp8"
                ),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plain() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "torch_dtype": "float16",
        })
    }

    fn with(more: Value) -> Value {
        let mut config = plain();
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    fn of(config: &Value) -> Result<Cache> {
        Cache::of(config, CacheDtype::Auto, StateDtype::Auto)
    }

    #[test]
    fn a_head_is_a_share_of_the_hidden_size_unless_the_config_says_otherwise() {
        let bytes = |more| of(&with(more)).unwrap().token_bytes();
        assert_eq!(bytes(json!({})), 4 * 2 * 2 * 64 * 2);
        assert_eq!(bytes(json!({"head_dim": null})), 4 * 2 * 2 * 64 * 2);
        assert_eq!(bytes(json!({"head_dim": 128})), 4 * 2 * 2 * 128 * 2);
        assert_eq!(bytes(json!({"num_key_value_heads": null})), 4 * 2 * 8 * 64 * 2);
        assert_eq!(bytes(json!({"num_key_value_heads": null, "num_kv_heads": 1})), 4 * 2 * 64 * 2);
        let old = of(&with(json!({"num_key_value_heads": null}))).unwrap();
        assert!(old.notes[0].contains("each of the 8 attention heads"), "{:?}", old.notes);
    }

    #[test]
    fn a_model_that_also_sees_has_its_language_model_inside() {
        let mut outer = json!({"architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16"});
        outer["text_config"] = with(json!({
            "torch_dtype": null, "sliding_window": 1024, "sliding_window_pattern": 6, "num_hidden_layers": 34,
        }));
        let cache = of(&outer).unwrap();
        assert_eq!((cache.full_layers, cache.sliding_layers, cache.window), (5, 29, 1024));
        assert_eq!(cache.dtype, "bfloat16");
        assert_eq!(cache.model, "Gemma3ForConditionalGeneration (llama)");
    }

    #[test]
    fn layers_slide_where_the_config_says_so() {
        let slides = |more| {
            let cache = of(&with(more)).unwrap();
            (cache.full_layers, cache.sliding_layers, cache.window)
        };
        assert_eq!(slides(json!({"sliding_window": null})), (4, 0, 0));
        assert_eq!(slides(json!({"sliding_window": 0, "model_type": "mistral"})), (4, 0, 0));
        assert_eq!(slides(json!({"sliding_window": 99, "use_sliding_window": false})), (4, 0, 0));
        assert_eq!(slides(json!({"sliding_window": 99, "model_type": "mistral"})), (0, 4, 99));
        assert_eq!(slides(json!({"sliding_window": 99, "model_type": "gemma2"})), (2, 2, 99));
        let (full, sliding) = ("full_attention", "sliding_attention");
        let types = json!([sliding, full, sliding, full]);
        assert_eq!(slides(json!({"sliding_window": 128, "layer_types": types})), (2, 2, 128));
        let types = json!([full, full, full, full]);
        assert_eq!(slides(json!({"sliding_window": 128, "layer_types": types})), (4, 0, 0));
    }

    #[test]
    fn layers_see_chunks_unless_they_have_no_positions() {
        let chunks = |mut more: Value| {
            more["model_type"] = json!("llama4_text");
            let cache = of(&with(more)).unwrap();
            (cache.full_layers, cache.sliding_layers, cache.window, cache.is_chunk)
        };
        assert_eq!(chunks(json!({"attention_chunk_size": 8192})), (1, 3, 8192, true));
        assert_eq!(chunks(json!({"attention_chunk_size": 8192, "no_rope_layers": []})), (1, 3, 8192, true));
        let listed = json!({"attention_chunk_size": 8192, "no_rope_layers": [1, 0, 1, 0]});
        assert_eq!(chunks(listed), (2, 2, 8192, true));
        assert_eq!(
            chunks(json!({"attention_chunk_size": 64, "no_rope_layer_interval": 2})),
            (2, 2, 64, true)
        );
        assert_eq!(chunks(json!({"attention_chunk_size": null})), (4, 0, 0, true));
        let short = with(json!({
            "model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": [0],
        }));
        assert!(of(&short).unwrap_err().to_string().contains("names 1 layers"));
    }

    #[test]
    fn an_indexer_has_a_key_of_its_own() {
        let config = with(json!({
            "model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
            "index_topk": 2048,
        }));
        let bytes = |dtype| Cache::of(&config, dtype, StateDtype::Auto).unwrap().token_bytes() / 4;
        assert_eq!((bytes(CacheDtype::Bfloat16), bytes(CacheDtype::Fp8)), (1152 + 132, 656 + 132));
    }

    /// The numbers are those of Qwen3-Next-80B.
    #[test]
    fn layers_with_states_keep_one_of_a_prompt() {
        let config = with(json!({
            "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        }));
        let cache = of(&config).unwrap();
        let states = cache.states.unwrap();
        assert_eq!((states.layers, cache.full_layers, cache.layers()), (36, 12, 12));
        assert_eq!(states.layer_bytes(), Some((8192 * 3 + 32 * 128 * 128) * 2));
        assert_eq!(cache.token_bytes(), 12 * 2 * 2 * 256 * 2);
        // The cache's data type is not that of states.
        let other = |cache, matrix| Cache::of(&config, cache, matrix).unwrap().states.unwrap();
        assert_eq!(other(CacheDtype::Fp8, StateDtype::Auto), states);
        let in_float32 = other(CacheDtype::Auto, StateDtype::Float32).layer_bytes();
        assert_eq!(in_float32, Some(8192 * 3 * 2 + 32 * 128 * 128 * 4));
        let types = json!(["linear_attention", "full_attention", "linear_attention", "linear_attention"]);
        let mut listed = config.clone();
        (listed["layer_types"], listed["num_hidden_layers"]) = (types, json!(4));
        assert_eq!(of(&listed).unwrap().states.unwrap().layers, 3);
        listed["num_hidden_layers"] = json!(5);
        assert!(of(&listed).unwrap_err().to_string().contains("names 4 layers"));

        let mamba = with(json!({
            "model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128,
            "mamba_d_conv": 4,
        }));
        let states = of(&mamba).unwrap().states.unwrap();
        assert_eq!(states.bytes(), Some(3 * ((2 * 512 + 2 * 128) * 3 + 16 * 64 * 128) * 2));
    }

    #[test]
    fn what_is_not_understood_is_refused_with_what_is_missing() {
        for (more, part) in [
            (json!({"num_hidden_layers": null}), "no 'num_hidden_layers'"),
            (json!({"num_hidden_layers": "four"}), "'num_hidden_layers' is \"four\""),
            (json!({"num_hidden_layers": 0}), "'num_hidden_layers' is 0"),
            (json!({"num_attention_heads": null}), "no 'num_attention_heads'"),
            (json!({"hidden_size": null}), "no 'hidden_size'"),
            (json!({"hidden_size": 513}), "no multiple"),
            (json!({"num_key_value_heads": [2, 2, 4, 4]}), "'num_key_value_heads' is [2,2,4,4]"),
            (json!({"torch_dtype": null}), "neither 'dtype' nor 'torch_dtype'"),
            (json!({"torch_dtype": "float8"}), "'float8'"),
            (json!({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}), "--kv-cache-dtype fp8"),
            (json!({"kv_lora_rank": 256}), "the model type 'llama'"),
            (json!({"kv_lora_rank": 512, "model_type": "deepseek_v3"}), "no 'qk_rope_head_dim'"),
            (json!({"v_head_dim": 32}), "'v_head_dim' 32"),
            (json!({"mamba_d_state": 128}), "'mamba_d_state'"),
            (json!({"index_topk": 2048}), "'index_topk'"),
            (json!({"is_encoder_decoder": true}), "'is_encoder_decoder'"),
            (json!({"layer_types": ["full_attention"]}), "names 1 layers"),
            (
                json!({"layer_types": ["full_attention", "linear_attention", "a", "b"]}),
                "\"linear_attention\"",
            ),
            (json!({"layer_types": vec!["sliding_attention"; 4]}), "no 'sliding_window'"),
            (json!({"sliding_window": 4096}), "which layers slide"),
            (json!({"head_dim": u64::MAX}), "too large"),
        ] {
            let error = of(&with(more.clone())).unwrap_err().to_string();
            assert!(error.contains(part), "{more}: {error}");
        }
        assert!(of(&json!([])).unwrap_err().to_string().contains("no JSON object"));
        assert!(of(&with(json!({"is_encoder_decoder": false, "num_kv_shared_layers": 0}))).is_ok());
    }

    #[test]
    fn the_dtype_of_the_cache_may_be_another_one_than_the_models() {
        let bytes = |dtype| Cache::of(&plain(), dtype, StateDtype::Auto).unwrap().element_bytes;
        assert_eq!(
            [CacheDtype::Auto, CacheDtype::Bfloat16, CacheDtype::Fp8, CacheDtype::Float32].map(bytes),
            [2, 2, 1, 4]
        );
        let turned = of(&with(json!({"torch_dtype": "float32"}))).unwrap();
        assert!(turned.element_bytes == 2 && turned.notes[0].contains("--dtype float32"));
    }
}
