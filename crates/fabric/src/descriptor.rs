//! What a process tells its peers about the memory that they may write or read.
//!
//! ```text
//!  0      4      5      6        8             16                            32         34         36
//!  +------+------+------+--------+-------------+-----------------------------+----------+----------+
//!  | KVFD | ver  |trust | 0      | boot nonce  | engine id                   | addresses| regions  |
//!  +------+------+------+--------+-------------+-----------------------------+----------+----------+
//!  trust:            0 a token, 1 the user's secret, 2 the secret that follows: | secret 32 |
//!  addresses, each:  | kind u8 | len u8 | len bytes |
//!  regions, each:    | number u32 | generation u32 | kind u8 | access u8 | 0 u16 | 0 u32 | len u64 |
//! ```
//! All numbers are little-endian. Bytes that are 0 here may mean something in a later version, which then has another
//! number. Where the memory is, and by which keys it is reached, no descriptor says: an engine tells that whoever has proved
//! the secret. Kinds that a reader does not know are left out, since a newer peer may have more.

use std::net::SocketAddr;
use std::str::FromStr;

use thiserror::Error;

use crate::trust::{SECRET_BYTES, Secret, Trust};

/// Longest descriptor that is read.
pub const DESCRIPTOR_BYTES_MAX: usize = 1 << 20;
/// Regions that can be registered at a time; their numbers are lower.
pub(crate) const REGIONS_MAX: u32 = 1 << 16;
const MAGIC: [u8; 4] = *b"KVFD";
const VERSION: u8 = 3;
const HEAD_BYTES: usize = 36;
const REGION_BYTES: usize = 24;

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// In the host's memory.
    Host,
    /// On a CUDA device.
    Cuda,
}

/// What a peer may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
    /// Nothing, but read what windows show of it. A descriptor does not name such regions.
    Windows,
}

impl Access {
    /// As it is written.
    pub(crate) fn code(self) -> u8 {
        match self {
            Access::Read => 0,
            Access::ReadWrite => 1,
            Access::Windows => 2,
        }
    }

    pub(crate) fn of_code(code: u8) -> Option<Access> {
        [Access::Read, Access::ReadWrite, Access::Windows].into_iter().find(|access| access.code() == code)
    }
}

/// How the process is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// 1: TCP. Others are left out by those who do not know them.
    pub kind: u8,
    /// At most 255 bytes.
    pub bytes: Vec<u8>,
}

const TCP: u8 = 1;

impl Address {
    /// Over TCP.
    pub(crate) fn tcp(address: SocketAddr) -> Address {
        Address { kind: TCP, bytes: address.to_string().into_bytes() }
    }

    /// None if it is of a kind that is not known here.
    fn socket_address(&self) -> Option<SocketAddr> {
        let text = (self.kind == TCP).then_some(&self.bytes)?;
        std::str::from_utf8(text).ok()?.parse().ok()
    }
}

/// A registered region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// Its number at its owner.
    pub number: u32,
    /// Counts how often the number was used; a request for another generation is refused.
    pub generation: u32,
    /// Where it lies.
    pub kind: MemoryKind,
    /// What a peer may do.
    pub access: Access,
    /// Its bytes.
    pub len: u64,
}

/// What a process tells its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Drawn when the process started: a peer that restarted at the same address has another one.
    pub boot_nonce: u64,
    /// Of the process.
    pub engine_id: u128,
    /// What whoever connects has to prove. With a secret of the engine's own, the descriptor is a key: whoever has it is let in.
    pub trust: Trust,
    /// All ways to reach it.
    pub addresses: Vec<Address>,
    /// Its memory.
    pub regions: Vec<RegionDescriptor>,
}

/// Why bytes are no descriptor, or a descriptor cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// Something else, or a part of one.
    #[error("not a memory descriptor of kvlane: {0}")]
    Malformed(&'static str),
    /// An older peer.
    #[error(
        "made by an older kvlane: a memory descriptor of version {0}, this is version {VERSION}: use the same version of kvlane \
         on both sides"
    )]
    Older(u8),
    /// A newer peer.
    #[error(
        "a memory descriptor of version {0}, this is version {VERSION}: use the same version of kvlane on both sides"
    )]
    Newer(u8),
    /// Too much for one.
    #[error("a memory descriptor holds {0}")]
    TooLarge(&'static str),
}

impl Descriptor {
    /// As bytes. Fails with more than 65,535 addresses or regions, or an address of more than 255 bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, DescriptorError> {
        let count = |len: usize| {
            u16::try_from(len).map_err(|_| DescriptorError::TooLarge("at most 65535 addresses and regions"))
        };
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.regions.len() * REGION_BYTES);
        bytes.extend(MAGIC);
        let (trust, secret) = match &self.trust {
            Trust::Token => (0, None),
            Trust::User => (1, None),
            Trust::Own(secret) => (2, Some(secret)),
        };
        bytes.extend([VERSION, trust, 0, 0]);
        bytes.extend(self.boot_nonce.to_le_bytes());
        bytes.extend(self.engine_id.to_le_bytes());
        bytes.extend(count(self.addresses.len())?.to_le_bytes());
        bytes.extend(count(self.regions.len())?.to_le_bytes());
        secret.iter().for_each(|secret| bytes.extend(secret.bytes()));
        for Address { kind, bytes: address } in &self.addresses {
            let len = u8::try_from(address.len());
            let len = len.map_err(|_| DescriptorError::TooLarge("addresses of at most 255 bytes"))?;
            bytes.extend([*kind, len]);
            bytes.extend(address);
        }
        for region in &self.regions {
            bytes.extend(region.number.to_le_bytes());
            bytes.extend(region.generation.to_le_bytes());
            bytes.push(match region.kind {
                MemoryKind::Host => 0,
                MemoryKind::Cuda => 1,
            });
            bytes.push(region.access.code());
            bytes.extend([0; 6]);
            bytes.extend(region.len.to_le_bytes());
        }
        match bytes.len() {
            0..=DESCRIPTOR_BYTES_MAX => Ok(bytes),
            _ => Err(DescriptorError::TooLarge("at most 1 MiB")),
        }
    }

    /// From bytes of any origin.
    pub fn from_bytes(bytes: &[u8]) -> Result<Descriptor, DescriptorError> {
        if bytes.len() > DESCRIPTOR_BYTES_MAX {
            return Err(DescriptorError::TooLarge("at most 1 MiB"));
        }
        let mut reader = Reader(bytes);
        if reader.array()? != MAGIC {
            return Err(DescriptorError::Malformed("it begins with something else"));
        }
        let [version, trust, ..] = reader.array::<4>()?;
        match version {
            VERSION => {}
            0..VERSION => return Err(DescriptorError::Older(version)),
            _ => return Err(DescriptorError::Newer(version)),
        }
        let boot_nonce = u64::from_le_bytes(reader.array()?);
        let engine_id = u128::from_le_bytes(reader.array()?);
        let addresses = u16::from_le_bytes(reader.array()?);
        let regions = u16::from_le_bytes(reader.array()?);
        let trust = match trust {
            0 => Trust::Token,
            1 => Trust::User,
            2 => Trust::Own(Secret::new(reader.array::<SECRET_BYTES>()?)),
            _ => return Err(DescriptorError::Malformed("what its engine trusts is not known")),
        };
        let mut descriptor =
            Descriptor { boot_nonce, engine_id, trust, addresses: Vec::new(), regions: Vec::new() };
        for _ in 0..addresses {
            let [kind, len] = reader.array()?;
            let bytes = reader.take(usize::from(len))?.to_vec();
            descriptor.addresses.push(Address { kind, bytes });
        }
        for _ in 0..regions {
            descriptor.regions.extend(reader.region()?);
        }
        match reader.0 {
            [] => Ok(descriptor),
            _ => Err(DescriptorError::Malformed("bytes are left over")),
        }
    }

    /// As text: [`Descriptor::to_bytes`] in hexadecimal digits, two for each byte. It is read by [`str::parse`].
    pub fn to_text(&self) -> Result<String, DescriptorError> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |half: u8| char::from(DIGITS[usize::from(half)]);
        Ok(self.to_bytes()?.into_iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect())
    }

    /// Where the process listens.
    pub fn socket_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().filter_map(Address::socket_address)
    }

    /// The region of a number.
    pub fn region(&self, number: u32) -> Option<&RegionDescriptor> {
        self.regions.iter().find(|region| region.number == number)
    }
}

/// From text of any origin, in hexadecimal digits of either case.
impl FromStr for Descriptor {
    type Err = DescriptorError;

    fn from_str(text: &str) -> Result<Descriptor, DescriptorError> {
        if text.len() > 2 * DESCRIPTOR_BYTES_MAX {
            return Err(DescriptorError::TooLarge("at most 1 MiB"));
        }
        let malformed = DescriptorError::Malformed("as text it is two hexadecimal digits for each byte");
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err(malformed) };
        let value = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
        let bytes: Option<Vec<u8>> =
            pairs.iter().map(|[high, low]| Some(value(*high)? << 4 | value(*low)?)).collect();
        Descriptor::from_bytes(&bytes.ok_or(malformed)?)
    }
}

/// The bytes that have not been read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], DescriptorError> {
        let (taken, rest) =
            self.0.split_at_checked(len).ok_or(DescriptorError::Malformed("it is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DescriptorError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// None of a kind that is not known here.
    fn region(&mut self) -> Result<Option<RegionDescriptor>, DescriptorError> {
        let number = u32::from_le_bytes(self.array()?);
        let generation = u32::from_le_bytes(self.array()?);
        let [kind, access, ..] = self.array::<8>()?;
        let len = u64::from_le_bytes(self.array()?);
        let kind = match kind {
            0 => MemoryKind::Host,
            1 => MemoryKind::Cuda,
            _ => return Ok(None),
        };
        let access = match access {
            0 => Access::Read,
            1 => Access::ReadWrite,
            _ => return Ok(None),
        };
        Ok(Some(RegionDescriptor { number, generation, kind, access, len }))
    }
}
