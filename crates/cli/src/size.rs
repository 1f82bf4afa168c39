//! Sizes as people write them. The same rules as in python/kvlane/bench/sizes.py.

use std::{fmt, str::FromStr};

use bytesize::ByteSize;
use serde::{Deserialize, Deserializer, de};

/// Bytes: `4gb` (10^9), `4g`, `4gi` or `4gib` (2^30), the same with k, m and t, `b`, or a plain number; in any letter case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    /// The mistake. clap's message adds the text and the flag.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let is_number = |c: char| c.is_ascii_digit() || c == '.';
        let (number, unit) = text.split_at(text.find(|c| !is_number(c)).unwrap_or(text.len()));
        let factor = factor(unit.trim())?;
        if !number.contains(|c: char| c.is_ascii_digit()) {
            return Err(EXAMPLES.into());
        }
        let too_large = || "it is more than 2^64 bytes".to_owned();
        if number.contains('.') {
            let bytes = number.parse::<f64>().map_err(|_| EXAMPLES)? * factor as f64;
            // Beyond 2^64 a cast would give 2^64 - 1.
            return if bytes < u64::MAX as f64 { Ok(Self(bytes as u64)) } else { Err(too_large()) };
        }
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
        bytes.map(Self).ok_or_else(too_large)
    }
}

const EXAMPLES: &str = "write for example 4gb, 512mib or 1073741824";

/// Bytes of a unit. A letter alone is a power of 1024, as for GNU's tools, Docker and most benchmarks.
fn factor(unit: &str) -> Result<u64, String> {
    let lower = unit.to_ascii_lowercase();
    if matches!(&*lower, "" | "b") {
        return Ok(1);
    }
    let power = "kmgt".find(|letter| lower.starts_with(letter)).map(|at| at as u32 + 1);
    match (power, lower.get(1..)) {
        (Some(power), Some("b")) => Ok(1000u64.pow(power)),
        (Some(power), Some("" | "i" | "ib")) => Ok(1024u64.pow(power)),
        _ => Err(format!(
            "the unit '{unit}' is unknown; b, kb, mb, gb and tb (powers of 1000) and k, m, g, t, kib, mib, gib and tib \
             (powers of 1024) are known"
        )),
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ByteSize::b(self.0).display().si())
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(TypedSize::deserialize(deserializer)?.size)
    }
}

/// A size, with the text that the user typed, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TypedSize {
    pub(crate) size: Size,
    pub(crate) typed: String,
}

impl FromStr for TypedSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self { size: text.parse()?, typed: text.to_owned() })
    }
}

impl<'de> Deserialize<'de> for TypedSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        let typed = match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => bytes.to_string(),
            Written::Text(text) => text,
        };
        let size = typed.parse().map_err(|why| de::Error::custom(format!("'{typed}' is no size: {why}")))?;
        Ok(Self { size, typed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kvlane serve --pool-size 4Gi`, as Kubernetes writes it, and `4g`, as the benchmarks of the same program take it, used
    /// to be refused; and `kvlane bench fabric --page-bytes 64kib`, as the daemon takes it, by the benchmarks.
    #[test]
    fn units_are_decimal_or_binary_as_written() {
        for (text, bytes) in [
            ("4gb", 4_000_000_000),
            ("4GB", 4_000_000_000),
            ("4GiB", 4 << 30),
            ("4Gi", 4 << 30),
            ("4g", 4 << 30),
            ("4G", 4 << 30),
            ("64k", 64 << 10),
            ("512Mi", 512 << 20),
            ("1.5 mib", 3 << 19),
            (" 1.5m ", 3 << 19),
            ("2kb", 2000),
            ("1tb", 1_000_000_000_000),
            ("1T", 1 << 40),
            ("7b", 7),
            ("7 B", 7),
            ("4096", 4096),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse::<Size>().unwrap().0, bytes, "{text}");
        }
    }

    #[test]
    fn mistakes_say_what_is_wrong_and_leave_the_value_to_who_asked() {
        for (text, part) in [
            ("4xb", "the unit 'xb' is unknown"),
            ("4 gigs", "'gigs'"),
            ("4g b", "'g b'"),
            ("1e400", "'e400'"),
            ("gb", "for example 4gb"),
            ("", "for example 4gb"),
            (".", "for example 4gb"),
            ("1.2.3", "for example 4gb"),
            ("-1gb", "the unit '-1gb'"),
            ("nangb", "'nangb'"),
            ("99999999999999999999gb", "2^64"),
            ("18446744073709551616", "2^64"),
            ("99999999999.5tb", "2^64"),
            ("4\u{212a}b", "is unknown"),
        ] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn what_was_written_is_kept() {
        let size: TypedSize = serde_json::from_str("\"64Mi\"").unwrap();
        assert_eq!((size.size, &*size.typed), (Size(64 << 20), "64Mi"));
        let size: TypedSize = serde_json::from_str("4096").unwrap();
        assert_eq!((size.size, &*size.typed), (Size(4096), "4096"));
        let error = serde_json::from_str::<Size>("\"4xb\"").unwrap_err().to_string();
        assert_eq!(error.matches("4xb").count(), 1, "{error}");
    }
}
