//! Predicts the times of an engine's steps, by formulas with measured coefficients. They come within a quarter of each measured
//! point, and within a fiftieth where requests only decode.

use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;

/// Coefficients for one model on one kind of hardware. Each is in milliseconds and not negative.
///
/// ```text
/// a step   = step + request * (requests that decode) + cached_token * (tokens of all these)
///                 + sum over parts of prompts: token * n + pair * n * (c + n / 2)      n new tokens behind c
/// a prompt = found * (tokens found in a cache) + before                                   in parallel with steps
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Time of an empty step.
    pub step: f64,
    /// Added by each request that decodes in a step.
    pub request: f64,
    /// Added by each token that a decoding request has so far.
    pub cached_token: f64,
    /// Added by each prefilled token.
    pub token: f64,
    /// Added by each pair of a prefilled token and one before it.
    pub pair: f64,
    /// Added to `before` by each token of a prompt that is found in a cache.
    pub found: f64,
    /// Overhead of a request: from its arrival to its first step, and from its token to the client.
    pub before: f64,
}

/// Why a file of measurements cannot be used.
#[derive(Debug, Error)]
pub enum CostsError {
    /// `bench/gpu/steps.py` did not write it.
    #[error("this is no file of bench/gpu/steps.py: {0}")]
    Json(#[from] serde_json::Error),
    /// A coefficient out of range.
    #[error("{name} is {value} ms: at least 0 and at most a minute")]
    Value {
        /// As in the error's text.
        name: &'static str,
        /// In milliseconds.
        value: f64,
    },
}

#[derive(Deserialize)]
struct File {
    found: Found,
}

#[derive(Deserialize)]
struct Found {
    fit: Fit,
}

#[derive(Deserialize)]
struct Fit {
    prefill: Prefill,
    decode: Decode,
}

#[derive(Deserialize)]
struct Prefill {
    base_ms: f64,
    token_ms: f64,
    known_ms: f64,
    pair_ms: f64,
}

#[derive(Deserialize)]
struct Decode {
    base_ms: f64,
    request_ms: f64,
    token_ms: f64,
}

impl Costs {
    /// Llama-3.1-8B's shape in vLLM 0.26 on one H100, with CUDA graphs: bench/gpu/results/2026-11-26-h100-steps.json.
    pub const H100_LLAMA_8B: Self = Self {
        step: 6.52,
        request: 0.007_38,
        cached_token: 4.30e-5,
        token: 0.021_42,
        pair: 7.48e-7,
        found: 0.000_585,
        before: 3.98,
    };

    /// Reads the JSON that `bench/gpu/steps.py` writes.
    ///
    /// # Errors
    /// It is another file, or a coefficient is out of range.
    pub fn from_steps(json: &str) -> Result<Self, CostsError> {
        let Fit { prefill, decode } = serde_json::from_str::<File>(json)?.found.fit;
        let costs = Self {
            step: decode.base_ms,
            request: decode.request_ms,
            cached_token: decode.token_ms,
            token: prefill.token_ms,
            pair: prefill.pair_ms,
            found: prefill.known_ms,
            // A prompt alone takes one step plus the overhead.
            before: (prefill.base_ms - decode.base_ms).max(0.0),
        };
        costs.checked()
    }

    /// Scales to other hardware: `prefill` multiplies the cost of prompts, `decode` that of steps and of decoding requests.
    #[must_use]
    pub fn times(self, prefill: f64, decode: f64) -> Self {
        Self {
            step: self.step * decode,
            request: self.request * decode,
            cached_token: self.cached_token * decode,
            token: self.token * prefill,
            pair: self.pair * prefill,
            ..self
        }
    }

    /// Checks that all coefficients are in range.
    ///
    /// # Errors
    /// One is negative, not a number, or longer than a minute.
    pub fn checked(self) -> Result<Self, CostsError> {
        let Self { step, request, cached_token, token, pair, found, before } = self;
        let all = [
            ("a step", step),
            ("a request", request),
            ("a cached token", cached_token),
            ("a token", token),
            ("a pair", pair),
            ("a found token", found),
            ("what is before", before),
        ];
        match all.into_iter().find(|(_, value)| !(0.0..=60_000.0).contains(value)) {
            Some((name, value)) => Err(CostsError::Value { name, value }),
            None => Ok(self),
        }
    }

    /// Time of a step in which `requests` decode that have `cached` tokens together. `parts` are the parts of prompts that it
    /// prefills: new tokens, and tokens before them.
    pub fn step(&self, requests: u64, cached: u64, parts: impl Iterator<Item = (u64, u64)>) -> Duration {
        let parts: f64 = parts.map(|(new, before)| self.prefill(new, before)).sum();
        milliseconds(self.step + self.request * requests as f64 + self.cached_token * cached as f64 + parts)
    }

    /// Milliseconds that prefilling `new` tokens behind `before` others adds to a step.
    pub fn prefill(&self, new: u64, before: u64) -> f64 {
        let (new, before) = (new as f64, before as f64);
        self.token * new + self.pair * new * (before + new / 2.0)
    }

    /// Time from a prompt's arrival to its first step, with `found` tokens from a cache.
    pub fn before(&self, found: u64) -> Duration {
        milliseconds(self.before + self.found * found as f64)
    }
}

pub(crate) fn milliseconds(value: f64) -> Duration {
    Duration::from_secs_f64(value.max(0.0) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: &str = include_str!("../../../bench/gpu/results/2026-11-26-h100-steps.json");

    #[test]
    fn the_constants_are_those_of_the_file_that_they_name() {
        let measured = Costs::from_steps(MEASURED).unwrap();
        let close = |ours: f64, theirs: f64| (ours / theirs - 1.0).abs() < 0.01;
        let ours = Costs::H100_LLAMA_8B;
        for (ours, theirs) in [
            (ours.step, measured.step),
            (ours.request, measured.request),
            (ours.cached_token, measured.cached_token),
            (ours.token, measured.token),
            (ours.pair, measured.pair),
            (ours.found, measured.found),
            (ours.before, measured.before),
        ] {
            assert!(close(ours, theirs), "{ours} {theirs}");
        }
    }

    /// Compares with the measured points themselves, not with the formulas that were fitted to them.
    #[test]
    fn the_formulas_come_near_what_was_measured() {
        let file: serde_json::Value = serde_json::from_str(MEASURED).unwrap();
        let costs = Costs::H100_LLAMA_8B;
        let number = |point: &serde_json::Value, name: &str| point[name].as_f64().unwrap();
        for point in file["found"]["decode"].as_array().unwrap() {
            let (batch, context) = (number(point, "batch") as u64, number(point, "context") as u64);
            let predicted = costs.step(batch, batch * context, std::iter::empty()).as_secs_f64() * 1e3;
            assert!((predicted / number(point, "ms") - 1.0).abs() < 0.02, "{point} {predicted}");
        }
        for point in file["found"]["prefill"].as_array().unwrap() {
            let (new, known) = (number(point, "tokens") as u64, number(point, "context") as u64);
            let ttft = costs.before(known) + costs.step(0, 0, std::iter::once((new, known)));
            let predicted = ttft.as_secs_f64() * 1e3;
            assert!((predicted / number(point, "ms") - 1.0).abs() < 0.26, "{point} {predicted}");
        }
        for point in file["found"]["mixed"].as_array().unwrap().iter().skip(1) {
            let (batch, context) = (number(point, "batch") as u64, number(point, "context") as u64);
            let new = number(point, "tokens") as u64;
            let step = costs.step(batch, batch * context, std::iter::once((new, 0)));
            let predicted = step.as_secs_f64() * 1e3;
            assert!((predicted / number(point, "ms") - 1.0).abs() < 0.25, "{point} {predicted}");
        }
    }

    #[test]
    fn numbers_that_no_engine_has_are_refused() {
        for value in [-1.0, f64::NAN, f64::INFINITY, 1e9] {
            let costs = Costs { pair: value, ..Costs::H100_LLAMA_8B };
            assert!(matches!(costs.checked(), Err(CostsError::Value { name: "a pair", .. })));
        }
        assert!(matches!(Costs::from_steps("{}"), Err(CostsError::Json(_))));
        assert!(matches!(Costs::from_steps(""), Err(CostsError::Json(_))));
    }
}
