//! [`TraceContext`]: which trace a request belongs to, and whether its caller sampled it. Pure, but for new ids.
//!
//! ```text
//!   traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
//!                version  trace, 16 bytes            parent span, 8     flags; bit 0: sampled
//! ```
//! Source: W3C Trace Context, <https://www.w3.org/TR/trace-context/>, section 3.2.

use std::{
    fmt,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
};

use thiserror::Error;

/// Identifies a span within its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(pub [u8; 8]);

impl SpanId {
    /// The parent of a root.
    pub const NONE: Self = Self([0; 8]);
}

/// The position of a request in its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// Identifies the trace; never 0.
    pub trace: [u8; 16],
    /// The span that is the parent of the next ones; [`SpanId::NONE`] where a trace begins.
    pub parent: SpanId,
    /// Whether the caller records its part of the trace.
    pub is_sampled: bool,
}

/// The text is no `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no traceparent: VERSION-TRACE-PARENT-FLAGS, in lower-case hexadecimal")]
pub struct BadTraceparent;

/// Longest text that is read. Versions above 0 may have more fields.
const BYTES_MAX: usize = 256;

impl FromStr for TraceContext {
    type Err = BadTraceparent;

    fn from_str(text: &str) -> Result<Self, BadTraceparent> {
        let bytes = text.as_bytes();
        if bytes.len() > BYTES_MAX || bytes.len() < 55 {
            return Err(BadTraceparent);
        }
        let mut parts = text.splitn(5, '-');
        let mut next = || parts.next().ok_or(BadTraceparent);
        let (version, trace, parent, flags) = (next()?, next()?, next()?, next()?);
        let [version] = hex::<1>(version)?;
        // Version 255 is forbidden, and version 0 has no more than four fields.
        if version == 0xff || version == 0 && bytes.len() != 55 {
            return Err(BadTraceparent);
        }
        let (trace, parent, [flags]) = (hex::<16>(trace)?, hex::<8>(parent)?, hex::<1>(flags)?);
        if trace == [0; 16] || parent == [0; 8] {
            return Err(BadTraceparent);
        }
        Ok(Self { trace, parent: SpanId(parent), is_sampled: flags & 1 == 1 })
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-")?;
        self.trace.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-")?;
        self.parent.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{:02x}", u8::from(self.is_sampled))
    }
}

impl TraceContext {
    /// The same trace below this span.
    pub fn below(self, span: SpanId) -> Self {
        Self { parent: span, ..self }
    }
}

/// Bytes from exactly twice as many lower-case hexadecimal digits.
fn hex<const BYTES: usize>(text: &str) -> Result<[u8; BYTES], BadTraceparent> {
    if text.len() != 2 * BYTES || !text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(BadTraceparent);
    }
    let mut bytes = [0; BYTES];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).map_err(|_| BadTraceparent)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| BadTraceparent)?;
    }
    Ok(bytes)
}

/// Makes ids of traces and spans, and decides which traces are sampled.
#[derive(Debug)]
pub struct Tracer {
    /// Random, so that two processes count from different numbers.
    seed: [u64; 2],
    next: AtomicU64,
    /// Traces of a hundred million that are sampled.
    sampled: u64,
}

const SAMPLES: u64 = 100_000_000;

impl Tracer {
    /// Samples this share (0 to 1) of the traces that begin here. `seed` is random.
    pub fn new(seed: [u8; 16], share: f64) -> Self {
        let seed = u128::from_le_bytes(seed);
        Self {
            seed: [seed as u64, (seed >> 64) as u64],
            next: AtomicU64::new(0),
            sampled: (share.clamp(0.0, 1.0) * SAMPLES as f64) as u64,
        }
    }

    /// A new span's id.
    pub fn span_id(&self) -> SpanId {
        SpanId(self.number().to_be_bytes())
    }

    /// A new trace without a span, and whether it is sampled.
    pub fn begin(&self) -> TraceContext {
        let (high, low) = (self.number(), self.number());
        let trace = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
        TraceContext { trace, parent: SpanId::NONE, is_sampled: low % SAMPLES < self.sampled }
    }

    /// Never 0, and different each time: `mix` maps no two numbers to the same one.
    fn number(&self) -> u64 {
        let count = self.next.fetch_add(1, Ordering::Relaxed);
        match mix(mix(self.seed[0].wrapping_add(count)) ^ self.seed[1]) {
            0 => self.seed[1] | 1,
            number => number,
        }
    }
}

/// A bijection that spreads small differences over all bits: the finalizer of SplitMix64 (Steele, Lea, Flood, 2014).
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let context: TraceContext = GIVEN.parse().unwrap();
        assert!(context.is_sampled && context.parent == SpanId(0xb7ad_6b71_6920_3331_u64.to_be_bytes()));
        assert_eq!(context.to_string(), GIVEN);
        let quiet: TraceContext = GIVEN.replace("-01", "-00").parse().unwrap();
        assert_eq!(quiet, TraceContext { is_sampled: false, ..context });
        let later = format!("01{}-more", &GIVEN[2..]);
        assert_eq!(later.parse(), Ok(context), "a later version may have more fields");
    }

    #[test]
    fn mistakes_are_refused() {
        let zeros = |from: usize, count: usize| {
            format!("{}{}{}", &GIVEN[..from], "0".repeat(count), &GIVEN[from + count..])
        };
        for text in [
            "",
            "00",
            &GIVEN[..54],
            &format!("{GIVEN}-more"),
            &GIVEN.to_uppercase(),
            &GIVEN.replace("00-", "ff-"),
            &zeros(3, 32),
            &zeros(36, 16),
            &GIVEN.replace('-', "_"),
            &format!("cc{}{}", &GIVEN[2..], "-x".repeat(200)),
        ] {
            assert_eq!(text.parse::<TraceContext>(), Err(BadTraceparent), "{text}");
        }
    }

    #[test]
    fn ids_are_new_and_the_share_is_sampled() {
        let tracer = Tracer::new([7; 16], 0.25);
        let traces: Vec<_> = (0..4000).map(|_| tracer.begin()).collect();
        let distinct: HashSet<_> = traces.iter().map(|trace| trace.trace).collect();
        let sampled = traces.iter().filter(|trace| trace.is_sampled).count();
        assert!(distinct.len() == 4000 && (800..1200).contains(&sampled), "{sampled}");
        assert!(!Tracer::new([7; 16], 0.0).begin().is_sampled);
        assert!(Tracer::new([7; 16], 1.0).begin().is_sampled);
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_the_same(text in ".{0,80}|[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}") {
            if let Ok(context) = text.parse::<TraceContext>() {
                prop_assert_eq!(context.to_string().parse(), Ok(context));
            }
        }
    }
}
