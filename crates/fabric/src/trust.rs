//! Chooses the secret that an engine and its peers prove to each other, and keeps the user's secret in the runtime folder.
//!
//! ```text
//!  a token was given  ------------------------------> Token   both sides were given it
//!  no token, and a runtime folder of the user's own -> User    a file in it, made by the first process that needs it
//!  no token, and no such folder --------------------> Own     32 random bytes, which the descriptor carries
//! ```
//! The engine that others connect to decides which secret it is, and its descriptor says so ([`Trust`]).
//!
//! The user's secret is never in a descriptor, a log, an argument or the environment. A process that has read it writes it again
//! if the file is gone when it makes its next engine. So replace the file only while no engine of the user runs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use kvlane_memory::{FolderRefused, RuntimeFolder};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

pub(crate) const SECRET_BYTES: usize = 32;
/// Name of the file with the user's secret, in the runtime folder.
const FILE: &str = "fabric-secret";

/// By runtime folder: the user's secret as this process last read it. Written again if something removes the file.
static KNOWN: Mutex<BTreeMap<PathBuf, Secret>> = Mutex::new(BTreeMap::new());

/// Key of the proofs that two processes make to each other: the secret that both know. [`Debug`](std::fmt::Debug) does not
/// show it.
#[derive(Clone)]
pub(crate) struct Key(Arc<[u8]>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    pub(crate) fn new(secret: &[u8]) -> Key {
        Key(secret.into())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A secret of 32 random bytes. [`Debug`](std::fmt::Debug) does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Wraps the bytes of a secret, which should be random.
    pub fn new(bytes: [u8; SECRET_BYTES]) -> Secret {
        Secret(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }

    fn random() -> io::Result<Secret> {
        Ok(Secret(kvlane_memory::random()?))
    }

    fn key(&self) -> Key {
        Key::new(&self.0)
    }
}

/// The secret that an engine, and each process that connects to it, prove to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// The token that both were made with.
    Token,
    /// The secret of the engine's user, which processes of that user on its host can read.
    User,
    /// This secret of the engine, which its descriptor carries: every holder of the descriptor may connect.
    Own(Secret),
}

/// Why an engine and a peer share no secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Mistrust {
    /// The peer has a token, and this engine has none.
    #[error("the peer was made with a token, and this engine without one: give both the same token")]
    TokenThere,
    /// This engine has a token, and the peer has none.
    #[error("this engine was made with a token, and the peer without one: give both the same token")]
    TokenHere,
    /// The peer trusts engines of its user, and this one does not know that user's secret.
    #[error(
        "the peer trusts engines of its user on its host, by a secret in that user's runtime folder, which this engine has \
         none of: give both the same token"
    )]
    NoUserSecret,
}

/// Why the user's secret is not used.
#[derive(Debug, Error)]
pub(crate) enum NoSecret {
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    #[error(
        "{FILE} in the runtime folder is no file of this user's alone, with {SECRET_BYTES} bytes: remove it"
    )]
    File,
    #[error("{FILE} in the runtime folder cannot be made or read: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for NoSecret {
    fn from(errno: Errno) -> NoSecret {
        NoSecret::Io(errno.into())
    }
}

/// The secrets of this engine.
#[derive(Debug)]
pub(crate) struct Proofs {
    /// The secret that this engine's descriptor asks for.
    pub(crate) trust: Trust,
    /// The key of that secret: processes that connect to this engine prove it.
    pub(crate) own: Key,
    /// The key of the user's secret. None: it cannot be read, or the engine has a token.
    user: Option<Key>,
}

impl Proofs {
    /// An empty token means that the engine has none.
    pub(crate) fn new(token: &str, folder: &RuntimeFolder) -> io::Result<Proofs> {
        if !token.is_empty() {
            return Ok(Proofs { trust: Trust::Token, own: Key::new(token.as_bytes()), user: None });
        }
        match user_secret(folder) {
            Ok(secret) => Ok(Proofs { trust: Trust::User, own: secret.key(), user: Some(secret.key()) }),
            Err(why) => {
                // Log: the secret of this user cannot be read or made, so engines do not find each other by
                // themselves. Do: mend the runtime folder as the field why says, or set `kvlane.direct.token`.
                tracing::warn!(%why, "no per-user secret; peers can connect only with this engine's descriptor");
                let secret = Secret::random()?;
                Ok(Proofs { own: secret.key(), trust: Trust::Own(secret), user: None })
            }
        }
    }

    /// The key to prove to a peer whose descriptor has this trust. An engine with a token connects only to engines with one.
    pub(crate) fn key_for(&self, peer: &Trust) -> Result<Key, Mistrust> {
        match (&self.trust, peer) {
            (Trust::Token, Trust::Token) => Ok(self.own.clone()),
            (Trust::Token, _) => Err(Mistrust::TokenHere),
            (_, Trust::Token) => Err(Mistrust::TokenThere),
            (_, Trust::User) => self.user.clone().ok_or(Mistrust::NoUserSecret),
            (_, Trust::Own(secret)) => Ok(secret.key()),
        }
    }
}

/// Reads the secret of the user who runs this process, or makes it if there is none. Processes that make it at once agree on
/// one.
fn user_secret(folder: &RuntimeFolder) -> Result<Secret, NoSecret> {
    crate::audit::takes_time("the reading of a file");
    let at = folder.path();
    let folder = folder.make()?;
    let found = match read(&folder) {
        Err(NoSecret::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            // If something has removed the file, running engines keep the secret that was there: write the same one again.
            let known = KNOWN.lock().get(at).cloned();
            make(&folder, &known.map_or_else(Secret::random, Ok)?)?;
            read(&folder)
        }
        found => found,
    }?;
    KNOWN.lock().insert(at.to_owned(), found.clone());
    Ok(found)
}

/// Writes a draft and links it as the secret. Only the first process's link succeeds; the others then read its secret. The file
/// never exists without all of its bytes.
fn make(folder: &OwnedFd, secret: &Secret) -> Result<(), NoSecret> {
    let draft = format!(".{FILE}-{:016x}", crate::random::random()?);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // With the sticky bit systemd-tmpfiles keeps it, however old (XDG Base Directory Specification, tmpfiles.d(5)).
    let mode = Mode::RUSR | Mode::WUSR | Mode::SVTX;
    let file = rustix::fs::openat(folder, &draft, flags, mode)?;
    let written = File::from(file).write_all(secret.bytes());
    let linked = written.map_err(NoSecret::from).and_then(|()| {
        match rustix::fs::linkat(folder, &draft, folder, FILE, AtFlags::empty()) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    });
    rustix::fs::unlinkat(folder, &draft, AtFlags::empty())?;
    linked
}

fn read(folder: &OwnedFd) -> Result<Secret, NoSecret> {
    // Without NONBLOCK, opening a pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(folder, FILE, flags, Mode::empty()) {
        // NOFOLLOW: the file is a symbolic link.
        Err(Errno::LOOP) => return Err(NoSecret::File),
        file => file?,
    };
    let found = rustix::fs::fstat(&file)?;
    let is_ours = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
        && found.st_uid == rustix::process::geteuid().as_raw()
        && found.st_mode & 0o077 == 0
        && found.st_size == SECRET_BYTES as i64;
    if !is_ours {
        return Err(NoSecret::File);
    }
    let mut bytes = [0; SECRET_BYTES];
    File::from(file).read_exact(&mut bytes)?;
    Ok(Secret(bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;
    use std::sync::Barrier;

    use super::*;

    struct Home {
        around: tempfile::TempDir,
        folder: RuntimeFolder,
    }

    impl Home {
        fn new() -> Home {
            let around = tempfile::tempdir().unwrap();
            let folder = RuntimeFolder::at(around.path().join("kvlane"));
            Home { around, folder }
        }

        fn file(&self) -> PathBuf {
            self.folder.path().join(FILE)
        }
    }

    #[test]
    fn all_who_start_at_once_have_one_secret_that_nobody_else_reads() {
        let home = Home::new();
        let together = Barrier::new(8);
        let secrets: Vec<Secret> = std::thread::scope(|scope| {
            let draw = || {
                together.wait();
                user_secret(&home.folder).unwrap()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(draw)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.windows(2).all(|pair| pair[0] == pair[1]));
        assert_eq!(fs::read(home.file()).unwrap(), secrets[0].bytes());
        assert_eq!(fs::metadata(home.file()).unwrap().permissions().mode() & 0o7777, 0o1600);
        let left: Vec<_> = fs::read_dir(home.folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no drafts: {left:?}");
        assert_ne!(secrets[0], user_secret(&Home::new().folder).unwrap(), "of another user");
        assert_eq!(format!("{:?}", secrets[0]), "Secret(..)");
    }

    /// A cleaner of /tmp removed the secret of engines that were running. The next engine made another one, and the two did not
    /// trust each other.
    #[test]
    fn a_secret_that_was_removed_is_written_again_by_a_process_that_knows_it() {
        let home = Home::new();
        let secret = user_secret(&home.folder).unwrap();
        fs::remove_file(home.file()).unwrap();
        assert_eq!(user_secret(&home.folder).unwrap(), secret);
        assert_eq!(fs::read(home.file()).unwrap(), secret.bytes());
        // If another process has made a new one meanwhile, that one counts.
        fs::write(home.file(), [7; SECRET_BYTES]).unwrap();
        assert_eq!(user_secret(&home.folder).unwrap(), Secret::new([7; SECRET_BYTES]));
    }

    #[test]
    fn a_secret_that_others_may_know_is_not_used_and_left_alone() {
        let home = Home::new();
        user_secret(&home.folder).unwrap();
        let refused = || assert!(matches!(user_secret(&home.folder), Err(NoSecret::File)));
        for mode in [0o604, 0o640, 0o644, 0o666] {
            fs::set_permissions(home.file(), Permissions::from_mode(mode)).unwrap();
            refused();
        }
        fs::set_permissions(home.file(), Permissions::from_mode(0o600)).unwrap();
        user_secret(&home.folder).unwrap();
        for bytes in [&b""[..], &[7; SECRET_BYTES - 1], &[7; SECRET_BYTES + 1]] {
            fs::write(home.file(), bytes).unwrap();
            refused();
            assert_eq!(fs::read(home.file()).unwrap(), bytes);
        }
        fs::remove_file(home.file()).unwrap();
        let elsewhere = home.around.path().join("elsewhere");
        fs::write(&elsewhere, [7; SECRET_BYTES]).unwrap();
        fs::set_permissions(&elsewhere, Permissions::from_mode(0o600)).unwrap();
        symlink(&elsewhere, home.file()).unwrap();
        refused();
    }

    #[test]
    fn who_proves_what_to_whom() {
        let home = Home::new();
        let user = || Proofs::new("", &home.folder).unwrap();
        fs::write(home.around.path().join("file"), "").unwrap();
        let nowhere = RuntimeFolder::at(home.around.path().join("file"));
        let own = || Proofs::new("", &nowhere).unwrap();
        let token = || Proofs::new("secret", &nowhere).unwrap();
        let is_one = |proofs: &Proofs, peer: &Proofs| {
            proofs.key_for(&peer.trust).map(|key| key.session(&NONCES) == peer.own.session(&NONCES))
        };
        const NONCES: crate::tcp::Nonces = crate::tcp::Nonces { listening: [1; 16], connecting: [2; 16] };
        assert_eq!(is_one(&user(), &user()), Ok(true));
        assert_eq!(is_one(&token(), &token()), Ok(true));
        assert_eq!(is_one(&own(), &own()), Ok(true), "by the secret of the peer");
        assert_eq!(is_one(&user(), &own()), Ok(true));
        assert_eq!(is_one(&own(), &user()), Err(Mistrust::NoUserSecret));
        for other in [user(), own()] {
            assert_eq!(is_one(&token(), &other), Err(Mistrust::TokenHere));
            assert_eq!(is_one(&other, &token()), Err(Mistrust::TokenThere));
        }
        assert_eq!(user().trust, Trust::User);
        assert!(matches!(own().trust, Trust::Own(_)));
    }
}
