//! Cache sizes as people write them.

use std::str::FromStr;

use anyhow::{Context, Result, bail};

use crate::size::Size;

/// A share of the trace's different blocks, a number of blocks, or bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Capacity {
    Percent(f64),
    Blocks(usize),
    Bytes(u64),
}

impl FromStr for Capacity {
    /// The mistake. clap's message adds the text.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(number) = text.strip_suffix('%') {
            let percent =
                number.trim().parse::<f64>().ok().filter(|percent| *percent > 0.0 && percent.is_finite());
            return percent
                .map(Self::Percent)
                .ok_or_else(|| "a share is above 0: write for example 10%".into());
        }
        let capacity = match text.parse::<usize>() {
            Ok(blocks) => Self::Blocks(blocks),
            Err(_) => {
                let size = text.parse::<Size>().map_err(|why| format!("no share, blocks or bytes: {why}"))?;
                Self::Bytes(size.0)
            }
        };
        match capacity {
            Self::Blocks(0) | Self::Bytes(0) => Err("a cache has to hold something".into()),
            _ => Ok(capacity),
        }
    }
}

impl Capacity {
    /// `blocks` as a share of the trace's `distinct` blocks. If the user asked for a share, exactly that share.
    pub(super) fn share(&self, blocks: usize, distinct: usize) -> f64 {
        match *self {
            Self::Percent(percent) => percent / 100.0,
            _ => blocks as f64 / distinct.max(1) as f64,
        }
    }

    /// The capacity in blocks, for a trace of `distinct` different ones.
    pub(super) fn blocks(&self, distinct: usize, block_bytes: Option<Size>) -> Result<usize> {
        match *self {
            Self::Percent(percent) => Ok(((distinct as f64 * percent / 100.0) as usize).max(1)),
            Self::Blocks(blocks) => Ok(blocks),
            Self::Bytes(bytes) => {
                let Size(block) = block_bytes.with_context(|| {
                    let example = "such as 64mib for 512 tokens of a model with 128 KiB a token";
                    format!("a capacity of {} needs --block-bytes, {example}", Size(bytes))
                })?;
                if block == 0 || block > bytes {
                    bail!("a capacity of {} holds no block of {}", Size(bytes), Size(block));
                }
                Ok(usize::try_from(bytes / block)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_blocks_and_bytes() {
        let blocks =
            |text: &str| text.parse::<Capacity>().unwrap().blocks(2000, Some(Size(2 << 20))).unwrap();
        assert_eq!(["1%", "0.01%", "150 %", "77", "1tib", "2MiB"].map(blocks), [20, 1, 3000, 77, 524_288, 1]);
        let error = "1gib".parse::<Capacity>().unwrap().blocks(2000, None).unwrap_err();
        assert!(error.to_string().contains("--block-bytes"), "{error}");
        assert!("1kib".parse::<Capacity>().unwrap().blocks(2000, Some(Size(2 << 20))).is_err());
    }

    #[test]
    fn mistakes_say_what_is_wrong() {
        for (text, part) in [
            ("0%", "10%"),
            ("-1%", "10%"),
            ("x%", "10%"),
            ("inf%", "10%"),
            ("0", "something"),
            ("0gb", "something"),
            ("1parsec", "'parsec'"),
            ("", "4gb"),
        ] {
            let error = text.parse::<Capacity>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
