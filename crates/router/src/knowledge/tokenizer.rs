//! Tokenizes a text as the engine's tokenizer does, with a cache so that a conversation's earlier turns cost nothing.
//!
//! ```text
//!   <|user|>How are you?<|end|> <|assistant|>Well.<|end|>     cut after each special token: each piece is tokenized as if it
//!   '- cached -'------------'------ cached ------'            stood alone, so each can come from the cache
//! ```
//! Some tokenizers give other tokens if the text is cut. Loading tries that with samples.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use thiserror::Error;
use tokenizers::Tokenizer as Encoder;
use xxhash_rust::xxh3::xxh3_128;

use super::{
    cache::TokenCache,
    template::{Template, TemplateError},
};

/// Memory of one tokenizer's cache.
const CACHE_BYTES_MAX: usize = 64 << 20;
/// Special tokens that loading tries cuts with.
const SPECIALS_TRIED: usize = 4;
/// Texts that loading tries cuts with.
const SAMPLES: [&str; 6] = ["a", " a b", "\n\nHello, wörld 123", "  ", "system\nYou are", ". End"];

/// Why a tokenizer cannot be loaded.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// `tokenizer.json` cannot be read or used.
    #[error("{file}: no tokenizer can be read from it: {error}")]
    Tokenizer {
        /// Path of the file.
        file: String,
        /// The library's text.
        error: String,
    },
    /// The chat template beside it cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// A model's tokenizer, and its chat template.
pub struct Tokenizer {
    encoder: Encoder,
    cache: Mutex<TokenCache>,
    /// Special tokens after which a text may be cut, longest first. Empty if cuts change tokens.
    cuts: Vec<String>,
    /// Tokens that the tokenizer puts before a prompt of `/v1/completions`. None if it adds more than that.
    lead: Option<Vec<u32>>,
    template: Option<Template>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("cuts", &self.cuts.len()).finish_non_exhaustive()
    }
}

/// A text cut into pieces, some of which have cached tokens.
#[derive(Debug)]
pub struct Pieces<'t> {
    lead: &'t [u32],
    pieces: Vec<Piece<'t>>,
    /// Whether the tokenizer has to add special tokens to the only piece.
    whole: bool,
}

#[derive(Debug)]
struct Piece<'t> {
    text: &'t str,
    hash: u128,
    tokens: Option<Arc<[u32]>>,
}

impl Pieces<'_> {
    /// Bytes of text without cached tokens.
    pub fn unknown(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.tokens.is_none()).map(|piece| piece.text.len()).sum()
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json`, or the one in this folder, with `tokenizer_config.json` and `chat_template.jinja` beside it.
    ///
    /// # Errors
    /// One of them cannot be used.
    pub fn load(path: &Path) -> Result<Self, TokenizerError> {
        let file: PathBuf = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let refused = |error: String| TokenizerError::Tokenizer { file: file.display().to_string(), error };
        let bytes = std::fs::read(&file).map_err(|error| refused(error.to_string()))?;
        let mut encoder = Encoder::from_bytes(bytes).map_err(|error| refused(error.to_string()))?;
        encoder.with_truncation(None).map_err(|error| refused(error.to_string()))?;
        encoder.with_padding(None);
        let template = Template::of_folder(file.parent().unwrap_or(Path::new(".")))?;
        let mut tokenizer = Self {
            encoder,
            cache: Mutex::new(TokenCache::new(CACHE_BYTES_MAX)),
            cuts: Vec::new(),
            lead: None,
            template,
        };
        tokenizer.lead = tokenizer.find_lead();
        tokenizer.cuts = tokenizer.find_cuts();
        Ok(tokenizer)
    }

    /// None if the model has no chat template.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// Cuts a text, and takes cached tokens. `special`: the tokenizer adds its special tokens, as for `/v1/completions`.
    pub fn pieces<'t>(&'t self, text: &'t str, special: bool) -> Pieces<'t> {
        let lead = self.lead.as_deref().filter(|_| special);
        let whole = special && lead.is_none();
        let cut = if whole { vec![text] } else { self.cut(text) };
        let mut cache = self.cache.lock();
        let piece = |text: &'t str| {
            let hash = xxh3_128(text.as_bytes()) ^ u128::from(whole);
            Piece { text, hash, tokens: cache.get(hash) }
        };
        let pieces = cut.into_iter().map(piece).collect();
        Pieces { lead: lead.unwrap_or_default(), pieces, whole }
    }

    /// The tokens of all pieces. Takes some microseconds for each hundred uncached bytes. None if the library fails.
    pub fn tokens(&self, pieces: Pieces<'_>) -> Option<Vec<u32>> {
        let mut all = pieces.lead.to_vec();
        for piece in pieces.pieces {
            let tokens = match piece.tokens {
                Some(tokens) => tokens,
                None => {
                    let tokens: Arc<[u32]> = self.encode(piece.text, pieces.whole)?.into();
                    self.cache.lock().put(piece.hash, Arc::clone(&tokens));
                    tokens
                }
            };
            all.extend_from_slice(&tokens);
        }
        Some(all)
    }

    fn encode(&self, text: &str, special: bool) -> Option<Vec<u32>> {
        self.encoder.encode_fast(text, special).ok().map(|encoding| encoding.get_ids().to_vec())
    }

    /// Cuts a text into pieces that each end with a special token, except the last.
    fn cut<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let (mut start, mut at) = (0, 0);
        // A table of first bytes, because most bytes begin none of the hundreds of special tokens.
        let mut begins = [false; 256];
        self.cuts
            .iter()
            .filter_map(|cut| cut.as_bytes().first())
            .for_each(|&byte| begins[usize::from(byte)] = true);
        while let Some(next) = text.as_bytes()[at..].iter().position(|&byte| begins[usize::from(byte)]) {
            at += next;
            let rest = &text.as_bytes()[at..];
            match self.cuts.iter().find(|cut| rest.starts_with(cut.as_bytes())) {
                Some(cut) => {
                    at += cut.len();
                    pieces.push(&text[start..at]);
                    start = at;
                }
                None => at += 1,
            }
        }
        if start < text.len() {
            pieces.push(&text[start..]);
        }
        pieces
    }

    /// The tokens that the tokenizer puts before each text. None if it adds others too.
    fn find_lead(&self) -> Option<Vec<u32>> {
        let lead = self.encode("", true)?;
        let is_all = |sample: &str| {
            let bare = self.encode(sample, false)?;
            let given = self.encode(sample, true)?;
            Some(given.strip_prefix(&lead[..]) == Some(&bare[..]))
        };
        SAMPLES.iter().all(|sample| is_all(sample) == Some(true)).then_some(lead)
    }

    /// The special tokens after which the tokenizer starts afresh. Empty if a sample shows that cuts change tokens.
    fn find_cuts(&self) -> Vec<String> {
        let added = self.encoder.get_added_tokens_decoder();
        let is_plain = |token: &&tokenizers::AddedToken| {
            token.special && !token.lstrip && !token.rstrip && !token.single_word && !token.normalized
        };
        let mut cuts: Vec<String> = added
            .values()
            .filter(is_plain)
            .map(|token| token.content.clone())
            .filter(|cut| !cut.is_empty())
            .collect();
        cuts.sort_by(|one, other| other.len().cmp(&one.len()).then_with(|| one.cmp(other)));
        let is_free = |cut: &String, before: &str, after: &str| {
            let first = format!("{before}{cut}");
            let mut apart = self.encode(&first, false)?;
            apart.extend(self.encode(after, false)?);
            Some(self.encode(&format!("{first}{after}"), false)? == apart)
        };
        let all_free = cuts.iter().take(SPECIALS_TRIED).all(|cut| {
            SAMPLES.iter().all(|before| SAMPLES.iter().all(|after| is_free(cut, before, after) == Some(true)))
        });
        if all_free { cuts } else { Vec::new() }
    }
}
