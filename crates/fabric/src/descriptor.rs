//! [`Descriptor`]: what a peer needs to connect to an engine and to name its regions. The caller transports it.
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
//! All numbers are little-endian. Bytes that are 0 here may get a meaning in a later version, which then has another version
//! number. A descriptor holds no addresses of memory and no keys: an engine announces those to peers that have proved the
//! secret. A reader leaves out kinds that it does not know, because a newer peer may have more.
//!
//! An address has kind 1: TCP, with the text of a socket address. A region has kind 0, host memory, or 1, memory of a CUDA GPU.

use std::net::SocketAddr;
use std::str::FromStr;

use thiserror::Error;

use crate::trust::{SECRET_BYTES, Secret, Trust};

/// Most bytes of a descriptor.
pub const DESCRIPTOR_BYTES_MAX: usize = 1 << 20;
/// Most regions and windows of one engine at a time. Their numbers are lower than this.
pub(crate) const REGIONS_MAX: u32 = 1 << 16;
const MAGIC: [u8; 4] = *b"KVFD";
const VERSION: u8 = 3;
const HEAD_BYTES: usize = 36;
const REGION_BYTES: usize = 24;

/// The kind of memory of a region or window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// The host's memory, on any NUMA node.
    Host,
    /// Memory of a CUDA device.
    Cuda,
}

/// The access that peers have to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Peers may read it.
    Read,
    /// Peers may read and write it.
    ReadWrite,
    /// Peers may only read ranges of it through windows. Descriptors leave such regions out.
    Windows,
}

impl Access {
    /// The code on the wire.
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

/// An address at which an engine is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// 1: TCP. Readers ignore addresses of kinds that they do not know.
    pub kind: u8,
    /// For TCP the text of a socket address. At most 255 bytes.
    pub bytes: Vec<u8>,
}

const TCP: u8 = 1;

impl Address {
    /// An address of kind TCP.
    pub(crate) fn tcp(address: SocketAddr) -> Address {
        Address { kind: TCP, bytes: address.to_string().into_bytes() }
    }

    /// None: the kind is not TCP, or the text is no socket address.
    fn socket_address(&self) -> Option<SocketAddr> {
        let text = (self.kind == TCP).then_some(&self.bytes)?;
        std::str::from_utf8(text).ok()?.parse().ok()
    }
}

/// A registered region, as a descriptor names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// Its number at its owner.
    pub number: u32,
    /// How often the number was used before. The owner refuses a request for another generation.
    pub generation: u32,
    /// The kind of memory of all of its bytes.
    pub kind: MemoryKind,
    /// The access that peers have.
    pub access: Access,
    /// Bytes of the region.
    pub len: u64,
}

/// Names an engine, its addresses and its regions to peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Drawn when the engine was made, so that an engine restarted at the same address has another one.
    pub boot_nonce: u64,
    /// The engine's id, drawn with the boot nonce.
    pub engine_id: u128,
    /// The secret that both sides of a connection prove. With [`Trust::Own`] the descriptor is a key: every holder may connect.
    pub trust: Trust,
    /// The addresses to connect to.
    pub addresses: Vec<Address>,
    /// The regions that were registered when the descriptor was made.
    pub regions: Vec<RegionDescriptor>,
}

/// Why bytes are no descriptor, or a descriptor cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// The bytes are something else, or only a part of a descriptor.
    #[error("not a memory descriptor of kvlane: {0}")]
    Malformed(&'static str),
    /// An older version of kvlane made it.
    #[error(
        "made by an older kvlane: a memory descriptor of version {0}, this is version {VERSION}: use the same version of kvlane \
         on both sides"
    )]
    Older(u8),
    /// A newer version of kvlane made it.
    #[error(
        "a memory descriptor of version {0}, this is version {VERSION}: use the same version of kvlane on both sides"
    )]
    Newer(u8),
    /// The descriptor would exceed one of the format's limits.
    #[error("a memory descriptor holds {0}")]
    TooLarge(&'static str),
}

impl Descriptor {
    /// Encodes it. Fails with more than 65,535 addresses or regions, an address of more than 255 bytes, or more than
    /// [`DESCRIPTOR_BYTES_MAX`] in all.
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

    /// Decodes bytes of any origin.
    pub fn from_bytes(bytes: &[u8]) -> Result<Descriptor, DescriptorError> {
        if bytes.len() > DESCRIPTOR_BYTES_MAX {
            return Err(DescriptorError::TooLarge("at most 1 MiB"));
        }
        let mut reader = DescriptorReader(bytes);
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

    /// Encodes it as text: [`Descriptor::to_bytes`] in hexadecimal digits, two for each byte. [`str::parse`] decodes it.
    pub fn to_text(&self) -> Result<String, DescriptorError> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |half: u8| char::from(DIGITS[usize::from(half)]);
        Ok(self.to_bytes()?.into_iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect())
    }

    /// Its addresses of kind TCP.
    pub fn socket_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().filter_map(Address::socket_address)
    }

    /// The region with this number.
    pub fn region(&self, number: u32) -> Option<&RegionDescriptor> {
        self.regions.iter().find(|region| region.number == number)
    }
}

/// Decodes text of any origin, in hexadecimal digits of either case.
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

/// Reads a descriptor; holds the bytes that are left.
struct DescriptorReader<'a>(&'a [u8]);

impl<'a> DescriptorReader<'a> {
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

    /// None: the kind or the access is not known here.
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
