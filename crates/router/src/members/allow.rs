//! The list of addresses that may send beats: `--ping-allow`.

use std::{fmt, net::IpAddr, net::Ipv4Addr, net::Ipv6Addr, str::FromStr};

use thiserror::Error;

/// Blocks of addresses; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList(Vec<Block>);

/// The addresses whose first `bits` bits are those of `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    first: IpAddr,
    bits: u8,
}

/// A text that is no block of addresses.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0} is no block of addresses: write 10.1.0.0/16, fd00::/8, or one address")]
pub struct AllowListError(String);

impl Default for AllowList {
    /// This host's addresses.
    fn default() -> Self {
        Self(vec![
            Block { first: IpAddr::V4(Ipv4Addr::LOCALHOST), bits: 8 },
            Block { first: IpAddr::V6(Ipv6Addr::LOCALHOST), bits: 128 },
        ])
    }
}

impl AllowList {
    /// These blocks; this host's addresses if there are none.
    pub fn new(blocks: Vec<Block>) -> Self {
        if blocks.is_empty() { Self::default() } else { Self(blocks) }
    }

    /// Whether an address is in one of the blocks. An IPv4 address mapped into IPv6 counts as IPv4.
    pub fn has(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|block| block.has(address))
    }
}

impl Block {
    fn has(self, address: IpAddr) -> bool {
        let shift = |whole: u32| whole - u32::from(self.bits);
        match (self.first, address) {
            (IpAddr::V4(first), IpAddr::V4(address)) => {
                (first.to_bits() ^ address.to_bits()).checked_shr(shift(32)).is_none_or(|rest| rest == 0)
            }
            (IpAddr::V6(first), IpAddr::V6(address)) => {
                (first.to_bits() ^ address.to_bits()).checked_shr(shift(128)).is_none_or(|rest| rest == 0)
            }
            _ => false,
        }
    }
}

impl FromStr for Block {
    type Err = AllowListError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || AllowListError(text.into());
        let (first, bits) = text.split_once('/').map_or((text, None), |(first, bits)| (first, Some(bits)));
        let first: IpAddr = first.parse().map_err(|_| wrong())?;
        let most = if first.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(most), |bits| bits.parse::<u8>().map_err(|_| wrong()))?;
        if bits > most { Err(wrong()) } else { Ok(Self { first, bits }) }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(blocks: &[&str]) -> AllowList {
        AllowList::new(blocks.iter().map(|block| block.parse().unwrap()).collect())
    }

    #[test]
    fn blocks_have_their_addresses_and_no_others() {
        let some = list(&["10.1.0.0/16", "192.0.2.7", "fd00::/8", "0.0.0.0/32"]);
        for (address, is_in) in [
            ("10.1.255.1", true),
            ("10.2.0.0", false),
            ("192.0.2.7", true),
            ("192.0.2.6", false),
            ("fdff::1", true),
            ("fe80::1", false),
            ("::ffff:10.1.2.3", true),
            ("127.0.0.1", false),
        ] {
            assert_eq!(some.has(address.parse().unwrap()), is_in, "{address}");
        }
        let all = list(&["0.0.0.0/0", "::/0"]);
        assert!(all.has("8.8.8.8".parse().unwrap()) && all.has("2001:db8::1".parse().unwrap()));
    }

    #[test]
    fn by_default_it_is_this_host() {
        let own = list(&[]);
        assert!(own.has("127.9.9.9".parse().unwrap()) && own.has("::1".parse().unwrap()));
        assert!(!own.has("10.0.0.1".parse().unwrap()) && !own.has("::2".parse().unwrap()));
    }

    #[test]
    fn what_is_no_block_is_named() {
        for wrong in ["", "10.0.0.0/33", "::/129", "localhost", "10.0.0.0/", "10.0.0.0/x", "10.0.0/8"] {
            assert_eq!(wrong.parse::<Block>(), Err(AllowListError(wrong.into())));
        }
    }
}
