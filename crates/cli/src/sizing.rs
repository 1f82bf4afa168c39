//! `kvlane size`: computes the bytes of a model's KV cache by a formula over its config.json.
//!
//! ```text
//! bytes a token = layers x bytes of a layer
//!   of a layer with heads (MHA, GQA, MQA):  2 (key and value) x KV heads x head_dim x bytes of an element
//!   of a latent layer (MLA):                (kv_lora_rank + qk_rope_head_dim) x bytes of an element
//!   of its indexer (DeepSeek-V3.2):         index_head_dim bytes, and 4 for each 128 of them
//! bytes a prompt = layers with states x (channels x inputs of the convolution x bytes of an element
//!                                        + heads x rows x columns x bytes of a matrix's number)
//! ```
//! As vLLM allocates it: `get_head_size` and `get_total_num_kv_heads` in its transformers_utils/model_arch_config_convertor.py.
//! A model that the formulas do not cover is refused, never guessed.

mod config;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use serde_json::{Value, json};

use self::config::{Cache, CacheDtype, Layer, StateDtype, States};
use crate::size::Size;

/// A worker's part of a block begins on a page of the pool.
const PAGE: u64 = 4096;

/// Reads the model's config.json only: no weights, no vLLM and no daemon are needed.
#[derive(Debug, Args)]
pub(crate) struct SizeArgs {
    /// The model's config.json, or the folder that it lies in
    config: PathBuf,
    /// Tokens that the pool shall hold; of prompts that begin alike, the common beginning counts once
    #[arg(long, value_name = "N", value_parser = parse_tokens)]
    tokens: u64,
    /// Prompts at whose ends the pool shall hold a state, if the model keeps states
    #[arg(long, value_name = "N", default_value_t = 1)]
    prompts: u64,
    /// Data type of the engine's cache, as vLLM's flag of this name; auto is what the config says
    #[arg(long, value_enum, value_name = "DTYPE", default_value = "auto")]
    kv_cache_dtype: CacheDtype,
    /// Data type of the matrices in states, as vLLM's flag of this name; auto is the model's
    #[arg(long, value_enum, value_name = "DTYPE", default_value = "auto")]
    mamba_ssm_cache_dtype: StateDtype,
    /// Tokens of a block, as vLLM's flag of this name; with states vLLM raises it to what a state takes
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    block_size: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_tokens(text: &str) -> Result<u64, String> {
    let digits = text.replace('_', "");
    match digits.parse::<u64>() {
        Ok(tokens) if tokens > 0 => Ok(tokens),
        _ => Err("write a whole number above 0, such as 1000000 or 1_000_000".into()),
    }
}

/// Prints the size of a cache and how it was computed.
pub(crate) fn run(args: &SizeArgs) -> Result<()> {
    let path = if args.config.is_dir() { args.config.join("config.json") } else { args.config.clone() };
    let named = || path.display().to_string();
    let text = fs::read_to_string(&path).map_err(|error| {
        anyhow!("{} cannot be read ({error}): name a model's config.json or its folder", named())
    })?;
    let read = serde_json::from_str::<Value>(&text)
        .map_err(|error| anyhow!("it is no JSON ({error}); name the config.json of a model"))
        .and_then(|config| Cache::of(&config, args.kv_cache_dtype, args.mamba_ssm_cache_dtype));
    let cache = read.with_context(named)?;
    let pool = Pool::of(&cache, args.tokens, args.prompts, args.block_size).with_context(|| {
        format!("--tokens {} --prompts {}: that is more than 2^64 bytes", args.tokens, args.prompts)
    })?;
    if args.json {
        println!("{:#}", to_json(&cache, &pool));
    } else {
        print!("{}", to_text(&cache, &pool));
    }
    Ok(())
}

/// The memory for a number of tokens.
struct Pool {
    tokens: u64,
    block_size: u64,
    blocks: u64,
    /// Bytes of a block, each part rounded up to whole pages.
    block_bytes: u64,
    /// States that it holds, one for each prompt.
    states: u64,
    /// Bytes of all layers' states at one token, rounded up in the same way.
    state_bytes: u64,
    bytes: u64,
}

impl Pool {
    /// None if the bytes exceed a `u64`.
    fn of(cache: &Cache, tokens: u64, prompts: u64, block_size: u64) -> Option<Self> {
        let layer_bytes = cache.layer.bytes(cache.element_bytes)?;
        let block_size = match &cache.states {
            // vLLM makes a layer's block as large as a state, in steps of the block that was asked for.
            Some(states) => block_size
                .checked_mul(states.layer_bytes()?.div_ceil(block_size.checked_mul(layer_bytes)?))?,
            None => block_size,
        };
        let blocks = tokens.div_ceil(block_size);
        // vLLM keeps the layers that slide in groups of their own, and each group has its own blocks.
        let part = |layers: u64| {
            layers.checked_mul(layer_bytes)?.checked_mul(block_size)?.checked_next_multiple_of(PAGE)
        };
        let block_bytes = part(cache.full_layers)?.checked_add(part(cache.sliding_layers)?)?;
        let (states, state_bytes) = match &cache.states {
            Some(states) => (prompts, states.bytes()?.checked_next_multiple_of(PAGE)?),
            None => (0, 0),
        };
        let bytes = blocks.checked_mul(block_bytes)?.checked_add(states.checked_mul(state_bytes)?)?;
        Some(Self { tokens, block_size, blocks, block_bytes, states, state_bytes, bytes })
    }
}

/// "36 layers x (8192 channels x 3 inputs (convolution) x 2 bytes + 32 heads x 128 x 128 x 2 bytes)".
fn state_formula(states: &States) -> String {
    let States { layers, channels, inputs, heads, rows, columns, input_bytes, matrix_bytes } = states;
    format!(
        "{layers} layers x ({channels} channels x {inputs} inputs (convolution) x {input_bytes} bytes + {heads} heads x {rows} x \
         {columns} x {matrix_bytes} bytes)"
    )
}

/// "32 layers x 2 (key and value) x 8 KV heads x 128 (head_dim) x 2 bytes (bfloat16)".
fn formula(cache: &Cache) -> String {
    let element = format!(
        "{} byte{} ({})",
        cache.element_bytes,
        if cache.element_bytes == 1 { "" } else { "s" },
        cache.dtype
    );
    let layer = match cache.layer {
        Layer::Heads { kv_heads, head_dim } => {
            format!("2 (key and value) x {kv_heads} KV heads x {head_dim} (head_dim)")
        }
        Layer::Latent { rank, rope } => format!("({rank} (kv_lora_rank) + {rope} (qk_rope_head_dim))"),
        Layer::Indexed { rank, rope, index } => {
            let bytes = cache.layer.bytes(cache.element_bytes).unwrap_or(u64::MAX);
            return format!(
                "{} layers x {bytes} bytes: {rank} (kv_lora_rank) and {rope} (qk_rope_head_dim) in {}, {index} (index_head_dim) \
                 in bytes with scales",
                cache.layers(),
                cache.dtype
            );
        }
    };
    format!("{} layers x {layer} x {element}", cache.layers())
}

/// Bytes that a hit loads for the layers with a window or a chunk, however long it is.
fn window_bytes(cache: &Cache, block_size: u64) -> u64 {
    let blocks = (cache.window - u64::from(!cache.is_chunk)).div_ceil(block_size).max(1);
    let layer = cache.layer.bytes(cache.element_bytes).unwrap_or(u64::MAX);
    layer.saturating_mul(cache.sliding_layers).saturating_mul(blocks.saturating_mul(block_size))
}

fn notes(cache: &Cache, pool: &Pool) -> Vec<String> {
    let mut notes = cache.notes.clone();
    if cache.sliding_layers > 0 {
        let (window, bytes) = (cache.window, window_bytes(cache, pool.block_size));
        let sees =
            if cache.is_chunk { format!("see chunks of {window}") } else { format!("look back {window}") };
        notes.push(format!(
            "{} of the {} layers {sees} tokens only. Their blocks may be saved for all tokens, and are counted so; a hit loads \
             {bytes} bytes ({}) of them, and {} for each of its tokens of the others",
            cache.sliding_layers,
            cache.layers(),
            Size(bytes),
            cache.token_bytes() / cache.layers() * cache.full_layers,
        ));
    }
    if let Some(states) = &cache.states {
        notes.push(format!(
            "{} of the {} layers keep a state instead of tokens. kvlane stores one where a prompt's last whole block ends: say \
             with --prompts how many. A hit loads one, and {} bytes for each of its tokens",
            states.layers,
            states.layers + cache.layers(),
            cache.token_bytes(),
        ));
    }
    if matches!(cache.layer, Layer::Latent { .. } | Layer::Indexed { .. }) {
        notes.push("all tensor-parallel ranks hold the same bytes, and kvlane keeps them once".into());
    }
    if pool.block_bytes > pool.block_size * cache.token_bytes() {
        notes.push(format!("a block is rounded up to whole pages of {PAGE} bytes"));
    }
    notes.push(
        "not counted: a draft model of speculative decoding, and each rank's rounding of a block to whole pages".into(),
    );
    notes
}

fn to_text(cache: &Cache, pool: &Pool) -> String {
    let mut text = format!(
        "model    {}\ntoken    {} bytes: {}\nblock    {} bytes: {} tokens\n",
        cache.model,
        cache.token_bytes(),
        formula(cache),
        pool.block_bytes,
        pool.block_size,
    );
    let mut holds = format!("{} blocks", pool.blocks);
    if let Some(states) = &cache.states {
        text.push_str(&format!("state    {} bytes: {}\n", pool.state_bytes, state_formula(states)));
        holds.push_str(&format!(" and {} states", pool.states));
    }
    text.push_str(&format!(
        "pool     {} bytes ({}) for {} tokens: {holds}\n",
        pool.bytes,
        Size(pool.bytes),
        pool.tokens
    ));
    for note in notes(cache, pool) {
        text.push_str(&paragraph("note", &note));
    }
    text.push_str(&format!("do       kvlane serve --pool-size {}\n", pool.bytes));
    text
}

/// A word in its column and a text beside it, in lines that fit a terminal.
fn paragraph(word: &str, text: &str) -> String {
    const WIDTH: usize = 100;
    const COLUMN: usize = 9;
    let mut lines = vec![format!("{word:COLUMN$}")];
    for part in text.split_whitespace() {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > COLUMN && line + 1 + part.chars().count() > WIDTH {
            lines.push(" ".repeat(COLUMN));
        }
        if let Some(line) = lines.last_mut() {
            if line.chars().count() > COLUMN {
                line.push(' ');
            }
            line.push_str(part);
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn to_json(cache: &Cache, pool: &Pool) -> Value {
    let window = (cache.sliding_layers > 0).then_some(cache.window);
    json!({
        "model": cache.model,
        "bytes_per_token": cache.token_bytes(),
        "formula": formula(cache),
        "layers": cache.layers(),
        "sliding_layers": cache.sliding_layers,
        "window_tokens": window,
        "state_layers": cache.states.map_or(0, |states| states.layers),
        "bytes_per_state": pool.state_bytes,
        "states": pool.states,
        "dtype": cache.dtype,
        "tokens": pool.tokens,
        "tokens_per_block": pool.block_size,
        "bytes_per_block": pool.block_bytes,
        "blocks": pool.blocks,
        "pool_bytes": pool.bytes,
        "notes": notes(cache, pool),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str) -> Value {
        let path = format!("{}/tests/models/{name}.json", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    /// Bytes a token as their makers and vLLM tell them: 128 KiB for Llama 3.1 8B, and so on.
    #[test]
    fn five_known_models_and_two_that_slide() {
        for (name, dtype, token, sliding) in [
            ("llama-3.1-8b", CacheDtype::Auto, 32 * 2 * 8 * 128 * 2, 0),
            ("llama-3.1-8b", CacheDtype::Fp8, 32 * 2 * 8 * 128, 0),
            ("llama-3.1-70b", CacheDtype::Auto, 80 * 2 * 8 * 128 * 2, 0),
            ("qwen3-30b-a3b", CacheDtype::Auto, 48 * 2 * 4 * 128 * 2, 0),
            ("deepseek-v3", CacheDtype::Auto, 61 * (512 + 64) * 2, 0),
            ("mistral-7b-v0.3", CacheDtype::Auto, 32 * 2 * 8 * 128 * 2, 0),
            ("mistral-7b-v0.1", CacheDtype::Auto, 32 * 2 * 8 * 128 * 2, 32),
            ("gpt-oss-20b", CacheDtype::Auto, 24 * 2 * 8 * 64 * 2, 12),
        ] {
            let cache = Cache::of(&model(name), dtype, StateDtype::Auto).unwrap();
            assert_eq!((cache.token_bytes(), cache.sliding_layers), (token, sliding), "{name}");
        }
    }

    #[test]
    fn a_pool_holds_whole_blocks_of_whole_pages() {
        let cache = Cache::of(&model("llama-3.1-8b"), CacheDtype::Auto, StateDtype::Auto).unwrap();
        let pool = Pool::of(&cache, 100_000, 1, 16).unwrap();
        assert_eq!((pool.blocks, pool.block_bytes, pool.bytes), (6250, 2 << 20, 6250 << 21));
        assert_eq!(Pool::of(&cache, 100_001, 1, 16).unwrap().blocks, 6251);
        let latent = Cache::of(&model("deepseek-v3"), CacheDtype::Auto, StateDtype::Auto).unwrap();
        let pool = Pool::of(&latent, 16, 1, 1).unwrap();
        assert_eq!(pool.block_bytes, 18 * 4096, "70,272 bytes are 17.2 pages");
        assert!(notes(&latent, &pool).iter().any(|note| note.contains("rounded up")));
        assert!(Pool::of(&cache, u64::MAX, 1, 16).is_none());
    }

    #[test]
    fn a_state_makes_blocks_larger_and_each_prompt_has_one() {
        let cache = Cache::of(&model("qwen3-next-80b-a3b"), CacheDtype::Auto, StateDtype::Auto).unwrap();
        let pool = Pool::of(&cache, 100_000, 50, 16).unwrap();
        let state = 36 * (8192 * 3 + 32 * 128 * 128) * 2;
        // A layer's block of 544 tokens is the first that holds a state, in steps of 16.
        assert_eq!((pool.block_size, pool.blocks, pool.block_bytes), (544, 184, 544 * 12 * 2048));
        assert_eq!((pool.states, pool.state_bytes), (50, state));
        assert_eq!(pool.bytes, 184 * 544 * 12 * 2048 + 50 * state);
        let text = to_text(&cache, &pool);
        assert!(text.contains(&format!(
            "state    {state} bytes: 36 layers x (8192 channels x 3 inputs (convolution) x 2 bytes + 32 heads x 128 x 128 x 2 bytes)\n"
        )));
        assert!(text.contains("tokens: 184 blocks and 50 states\n"), "{text}");
        assert!(text.contains("36 of the 48 layers keep a state"), "{text}");
        assert_eq!(to_json(&cache, &pool)["bytes_per_state"], json!(state));
        assert!(Pool::of(&cache, 1, u64::MAX, 16).is_none());
    }

    #[test]
    fn a_person_sees_how_it_was_computed() {
        let cache = Cache::of(&model("llama-3.1-8b"), CacheDtype::Auto, StateDtype::Auto).unwrap();
        let pool = Pool::of(&cache, 1_000_000, 1, 16).unwrap();
        let text = to_text(&cache, &pool);
        for wanted in [
            "model    LlamaForCausalLM (llama)\n",
            "token    131072 bytes: 32 layers x 2 (key and value) x 8 KV heads x 128 (head_dim) x 2 bytes (bfloat16)\n",
            "pool     131072000000 bytes (131.1 GB) for 1000000 tokens: 62500 blocks\n",
            "do       kvlane serve --pool-size 131072000000\n",
        ] {
            assert!(text.contains(wanted), "{wanted} in\n{text}");
        }
        let json = to_json(&cache, &pool);
        assert_eq!(
            (&json["bytes_per_token"], &json["pool_bytes"]),
            (&json!(131_072), &json!(131_072_000_000_u64))
        );
        let hybrid = Cache::of(&model("gpt-oss-20b"), CacheDtype::Auto, StateDtype::Auto).unwrap();
        let told = notes(&hybrid, &Pool::of(&hybrid, 1000, 1, 16).unwrap()).join("\n");
        assert!(told.contains("12 of the 24 layers look back 128 tokens only"), "{told}");
        // 8 blocks of 16 tokens in 12 layers, of 2 x 8 x 64 numbers of 2 bytes.
        let of_a_token = 12 * 2 * 8 * 64 * 2;
        assert_eq!(window_bytes(&hybrid, 16), 8 * 16 * of_a_token);
        assert!(told.contains(&format!("and {of_a_token} for each of its tokens of the others")), "{told}");
    }

    #[test]
    fn notes_fit_a_terminal() {
        let text = paragraph("note", &"word ".repeat(50));
        assert!(text.lines().count() == 3 && text.lines().all(|line| line.len() <= 100), "{text}");
        assert!(
            text.starts_with("note     word word")
                && text.lines().nth(1).unwrap().starts_with("         word")
        );
    }

    #[test]
    fn tokens_are_a_whole_number() {
        assert_eq!(parse_tokens("1_000_000"), Ok(1_000_000));
        for text in ["0", "-1", "1.5", "many", ""] {
            assert!(parse_tokens(text).unwrap_err().contains("1_000_000"), "{text}");
        }
    }
}
