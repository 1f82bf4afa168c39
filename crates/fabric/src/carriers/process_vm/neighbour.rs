//! Reads the memory of one process of this host with `process_vm_readv`, and checks its card in the same call.

#![allow(unsafe_code, reason = "the kernel writes registered memory")]

use kvlane_memory::{ProbeError, RemoteProcess};
use rustix::io::Errno;
use thiserror::Error;

use super::super::card::{IDENTITY_BYTES, identity_bytes, mark_of};
use crate::identity::Identity;
use crate::ranges::Piece;

/// Bytes to read from another process, from an address of that process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PulledRange {
    pub(crate) to: Piece,
    pub(crate) from: u64,
}

impl PulledRange {
    /// The first `len` bytes, and the rest.
    pub(crate) fn split_at(self, len: usize) -> (PulledRange, PulledRange) {
        let first = PulledRange { to: Piece { len, ..self.to }, from: self.from };
        // A peer may name any address, even the very last one. The rest is empty there, so the wrapped address is never read.
        (first, PulledRange { to: self.to.after(len), from: self.from.wrapping_add(len as u64) })
    }
}

/// Most parts of one call. Each part may lie in another region, whose card word is one more iovec, and the kernel
/// takes 1,024.
pub(crate) const RANGES_MAX: usize = 500;

/// Why the bytes that were read do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum PullError {
    #[error("the peer's process is gone")]
    Gone,
    /// The memory is not registered, not mapped, or of another generation.
    #[error("not the peer's registered memory")]
    Refused,
    /// The copy was cancelled before all bytes were read.
    #[error("the copy was given up")]
    GivenUp,
    /// The process cannot be read any more, or not now. That says nothing about its memory.
    #[error("the peer's memory cannot be read any more: {0}")]
    Failed(Errno),
}

/// A process whose card was read and named the expected engine.
#[derive(Debug)]
pub(crate) struct Neighbour {
    process: RemoteProcess,
    identity: Identity,
    card: u64,
}

impl Neighbour {
    /// Reads the card at this address of this pid, by the very call that transfers will use.
    pub(crate) fn probe(pid: u32, card: u64, identity: Identity) -> Result<Neighbour, ProbeError> {
        crate::audit::takes_time("a read of another process's card");
        let neighbour = Neighbour { process: RemoteProcess::open(pid)?, identity, card };
        let mut found = [0u8; IDENTITY_BYTES];
        let local = [range(found.as_mut_ptr(), IDENTITY_BYTES)];
        // SAFETY: the local range is `found`, which nobody else touches.
        let read = unsafe { neighbour.process.read(&local, &[remote(card, IDENTITY_BYTES)]) };
        match read {
            _ if neighbour.process.has_exited() => Err(ProbeError::Gone),
            Ok(_) if found == identity_bytes(identity) => Ok(neighbour),
            Ok(_) => Err(ProbeError::WrongNonce),
            Err(errno) => Err(RemoteProcess::explain(errno)),
        }
    }

    /// Whether its engine may still be there. A process that cannot be read counts as there, since its card may be too.
    pub(crate) fn is_there(&self) -> bool {
        // SAFETY: there is no destination.
        let card = unsafe { self.read(&[], &[]) };
        matches!(card, Ok(()) | Err(PullError::Failed(_)))
    }

    /// Reads addresses that the neighbour itself named, at most [`RANGES_MAX`] parts.
    ///
    /// # Safety
    /// The destinations are valid for writes, and belong to this call.
    pub(crate) unsafe fn pull(&self, parts: &[PulledRange]) -> Result<(), PullError> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.copy(parts, &mut [], &[]) }
    }

    /// Reads regions, named by (number, generation), at most [`RANGES_MAX`] parts. The bytes count only if all regions were
    /// still registered after the last byte was read.
    ///
    /// # Safety
    /// As for [`Neighbour::pull`].
    pub(crate) unsafe fn read(&self, parts: &[PulledRange], regions: &[(u32, u32)]) -> Result<(), PullError> {
        let mut found = vec![0u8; IDENTITY_BYTES + 4 * regions.len()];
        let mut card = Vec::with_capacity(1 + regions.len());
        card.push(remote(self.card, IDENTITY_BYTES));
        for (region, generation) in regions {
            let (address, _) = mark_of(self.card, *region, *generation).ok_or(PullError::Refused)?;
            card.push(remote(address, 4));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.copy(parts, &mut found, &card)? };
        let (identity, words) = found.split_at(IDENTITY_BYTES);
        let is_mark = |(word, (region, generation)): (&[u8; 4], &(u32, u32))| {
            let mark = mark_of(self.card, *region, *generation);
            mark.is_some_and(|(_, mark)| u32::from_le_bytes(*word) == mark)
        };
        let are_registered = words.as_chunks::<4>().0.iter().zip(regions).all(is_mark);
        match are_registered && identity == identity_bytes(self.identity) {
            true => Ok(()),
            false => Err(PullError::Refused),
        }
    }

    /// One system call: the parts first, then the words of the card.
    ///
    /// # Safety
    /// As for [`Neighbour::pull`].
    unsafe fn copy(
        &self,
        parts: &[PulledRange],
        found: &mut [u8],
        card: &[libc::iovec],
    ) -> Result<(), PullError> {
        crate::audit::takes_time("a copy from another process");
        debug_assert!(parts.len() <= RANGES_MAX);
        let mut local = Vec::with_capacity(parts.len() + 1);
        let mut theirs = Vec::with_capacity(parts.len() + card.len());
        for PulledRange { to, from } in parts {
            local.push(range(to.pointer(), to.len));
            theirs.push(remote(*from, to.len));
        }
        local.extend((!found.is_empty()).then(|| range(found.as_mut_ptr(), found.len())));
        theirs.extend(card);
        let bytes = parts.iter().map(|part| part.to.len).sum::<usize>() + found.len();
        // SAFETY: the destinations are the caller's, and `found` is ours alone.
        let read = unsafe { self.process.read(&local, &theirs) };
        // Checked after the call: if the process lives now, no other process can have had its pid meanwhile.
        match read {
            _ if self.process.has_exited() => Err(PullError::Gone),
            Ok(read) if read == bytes as u64 => Ok(()),
            Ok(_) | Err(Errno::FAULT) => Err(PullError::Refused),
            // ESRCH too: the kernel says so if a process's first thread has ended while others go on.
            Err(errno) => Err(PullError::Failed(errno)),
        }
    }
}

fn range(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: start.cast(), iov_len: len }
}

fn remote(address: u64, len: usize) -> libc::iovec {
    range(std::ptr::without_provenance_mut(address as usize), len)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::Card;
    use super::*;

    const ME: Identity = Identity { engine: 7, boot: 9 };

    fn piece(bytes: &mut [u8]) -> Piece {
        Piece { address: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() }
    }

    fn neighbour(card: &Card) -> Neighbour {
        Neighbour::probe(std::process::id(), card.address(), ME).unwrap()
    }

    #[test]
    fn bytes_count_while_their_region_is_registered() {
        let card = Card::new(ME);
        let (mut theirs, mut mine) = (vec![3u8; 10_000], vec![0u8; 10_000]);
        let neighbour = neighbour(&card);
        let from = piece(&mut theirs).address as u64;
        let (first, second) = mine.split_at_mut(5000);
        // The halves swap.
        let parts =
            [PulledRange { to: piece(first), from: from + 5000 }, PulledRange { to: piece(second), from }];
        theirs[..5000].fill(4);
        let read = |regions: &[(u32, u32)]| {
            // SAFETY: the parts lie in `mine`.
            unsafe { neighbour.read(&parts, regions) }
        };
        assert_eq!(read(&[(5, 0)]), Err(PullError::Refused), "nobody registered it");
        card.add(5, 0);
        card.add(6, 3);
        assert_eq!(read(&[(5, 0), (6, 3)]), Ok(()));
        assert_eq!(read(&[(5, 0), (6, 2)]), Err(PullError::Refused), "an earlier generation");
        card.remove(5);
        assert_eq!(read(&[(5, 0)]), Err(PullError::Refused));
        assert_eq!(read(&[(5, u32::MAX)]), Err(PullError::Refused), "no mark for the last generation");
        card.add(5, 1);
        assert_eq!(read(&[(5, 1)]), Ok(()));
        card.clear();
        assert_eq!(read(&[]), Err(PullError::Refused), "nobody is there any more");
        assert!(mine[..5000].iter().all(|byte| *byte == 3) && mine[5000..].iter().all(|byte| *byte == 4));
    }

    #[test]
    fn memory_that_is_not_there_is_refused_and_a_wrong_card_too() {
        let card = Card::new(ME);
        card.add(0, 0);
        let mut mine = vec![0u8; 64];
        let parts = [PulledRange { to: piece(&mut mine), from: 4096 }];
        // SAFETY: the part lies in `mine`.
        assert_eq!(unsafe { neighbour(&card).pull(&parts) }, Err(PullError::Refused));
        let wrong = Neighbour::probe(std::process::id(), card.address(), Identity { boot: 8, ..ME });
        assert_eq!(wrong.unwrap_err(), ProbeError::WrongNonce);
        let nowhere = Neighbour::probe(std::process::id(), 8, ME);
        assert_eq!(nowhere.unwrap_err(), ProbeError::WrongNonce);
        assert!(Neighbour::probe(0, card.address(), ME).is_err());
    }

    #[test]
    fn a_process_that_has_exited_is_gone() {
        let card = Card::new(ME);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = RemoteProcess::open(child.id()).unwrap();
        let neighbour = Neighbour { process, identity: ME, card: card.address() };
        child.kill().unwrap();
        child.wait().unwrap();
        let mut mine = vec![0u8; 64];
        let parts = [PulledRange { to: piece(&mut mine), from: card.address() }];
        // SAFETY: the part lies in `mine`.
        assert_eq!(unsafe { neighbour.pull(&parts) }, Err(PullError::Gone));
    }
}
