//! Whom an engine trusts: who knows its token, who can read its user's secret, or who has its descriptor.
//!
//! ```text
//!  a token was given  ------------------------------> Token   both sides were given it
//!  no token, and a runtime folder of the user's own -> User    a file in it, made by whoever needs it first
//!  no token, and no such folder --------------------> Own     32 random bytes, which the descriptor carries
//! ```

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
/// Of the user's secret, in the runtime folder.
const FILE: &str = "fabric-secret";

/// The user's secret that this process has read, by its folder.
static KNOWN: Mutex<BTreeMap<PathBuf, Secret>> = Mutex::new(BTreeMap::new());

/// Key of the proofs that two processes make to each other, from the secret that both know. [`Debug`](std::fmt::Debug) does
/// not show it.
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

/// Random bytes that prove who has them. They are not shown by [`Debug`](std::fmt::Debug).
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// These bytes.
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

/// What whoever connects to an engine has to prove, and the engine to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// That they were given its token.
    Token,
    /// That they can read the secret of its user, on its host.
    User,
    /// That they have its descriptor, which carries this.
    Own(Secret),
}

/// Why an engine and a peer have nothing to prove to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Mistrust {
    /// The peer wants a token.
    #[error("the peer was made with a token, and this engine without one: give both the same token")]
    TokenThere,
    /// The peer has none.
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

/// What this process proves to its peers.
#[derive(Debug)]
pub(crate) struct Proofs {
    /// Whom this engine trusts, as its descriptor says to peers.
    pub(crate) trust: Trust,
    /// Of whoever connects to us.
    pub(crate) own: Key,
    /// Of the user, if it can be had.
    user: Option<Key>,
}

impl Proofs {
    /// With an empty token, those of an engine that was given none.
    pub(crate) fn new(token: &str, folder: &RuntimeFolder) -> io::Result<Proofs> {
        if !token.is_empty() {
            return Ok(Proofs { trust: Trust::Token, own: Key::new(token.as_bytes()), user: None });
        }
        match user_secret(folder) {
            Ok(secret) => Ok(Proofs { trust: Trust::User, own: secret.key(), user: Some(secret.key()) }),
            Err(why) => {
                tracing::warn!(%why, "engines of this user do not find each other by themselves: only who has a descriptor");
                let secret = Secret::random()?;
                Ok(Proofs { own: secret.key(), trust: Trust::Own(secret), user: None })
            }
        }
    }

    /// What is to be proved where a peer's descriptor says this. Who was given a token talks to nobody without it.
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

/// The secret of the user who runs this process: read, or made if there is none. Processes that make it at once agree on one.
fn user_secret(folder: &RuntimeFolder) -> Result<Secret, NoSecret> {
    crate::audit::takes_time("the reading of a file");
    let at = folder.path();
    let folder = folder.make()?;
    let found = match read(&folder) {
        Err(NoSecret::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            // Where something has cleaned up in the folder, the engines that run go on with the secret that was there.
            let known = KNOWN.lock().get(at).cloned();
            make(&folder, &known.map_or_else(Secret::random, Ok)?)?;
            read(&folder)
        }
        found => found,
    }?;
    KNOWN.lock().insert(at.to_owned(), found.clone());
    Ok(found)
}

/// Whoever links it first has made it: the others' links fail. It is never there without all of its bytes.
fn make(folder: &OwnedFd, secret: &Secret) -> Result<(), NoSecret> {
    let draft = format!(".{FILE}-{:016x}", crate::random::random()?);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // With the sticky bit systemd-tmpfiles lets it lie, however old (XDG Base Directory Specification, tmpfiles.d(5)).
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
    // Without NONBLOCK opening a pipe would wait.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(folder, FILE, flags, Mode::empty()) {
        // A link.
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

    struct Place {
        around: tempfile::TempDir,
        folder: RuntimeFolder,
    }

    impl Place {
        fn new() -> Place {
            let around = tempfile::tempdir().unwrap();
            let folder = RuntimeFolder::at(around.path().join("kvlane"));
            Place { around, folder }
        }

        fn file(&self) -> PathBuf {
            self.folder.path().join(FILE)
        }
    }

    #[test]
    fn all_who_start_at_once_have_one_secret_that_nobody_else_reads() {
        let place = Place::new();
        let together = Barrier::new(8);
        let secrets: Vec<Secret> = std::thread::scope(|scope| {
            let draw = || {
                together.wait();
                user_secret(&place.folder).unwrap()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(draw)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.windows(2).all(|pair| pair[0] == pair[1]));
        assert_eq!(fs::read(place.file()).unwrap(), secrets[0].bytes());
        assert_eq!(fs::metadata(place.file()).unwrap().permissions().mode() & 0o7777, 0o1600);
        let left: Vec<_> = fs::read_dir(place.folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no drafts: {left:?}");
        assert_ne!(secrets[0], user_secret(&Place::new().folder).unwrap(), "of another user");
        assert_eq!(format!("{:?}", secrets[0]), "Secret(..)");
    }

    /// What cleans up in /tmp removed the secret of engines that were running: the next one made another, and the two did
    /// not trust each other.
    #[test]
    fn a_secret_that_was_removed_is_written_again_by_a_process_that_knows_it() {
        let place = Place::new();
        let secret = user_secret(&place.folder).unwrap();
        fs::remove_file(place.file()).unwrap();
        assert_eq!(user_secret(&place.folder).unwrap(), secret);
        assert_eq!(fs::read(place.file()).unwrap(), secret.bytes());
        // Who has made another one meanwhile is right.
        fs::write(place.file(), [7; SECRET_BYTES]).unwrap();
        assert_eq!(user_secret(&place.folder).unwrap(), Secret::new([7; SECRET_BYTES]));
    }

    #[test]
    fn a_secret_that_others_may_know_is_not_used_and_left_alone() {
        let place = Place::new();
        user_secret(&place.folder).unwrap();
        let refused = || assert!(matches!(user_secret(&place.folder), Err(NoSecret::File)));
        for mode in [0o604, 0o640, 0o644, 0o666] {
            fs::set_permissions(place.file(), Permissions::from_mode(mode)).unwrap();
            refused();
        }
        fs::set_permissions(place.file(), Permissions::from_mode(0o600)).unwrap();
        user_secret(&place.folder).unwrap();
        for bytes in [&b""[..], &[7; SECRET_BYTES - 1], &[7; SECRET_BYTES + 1]] {
            fs::write(place.file(), bytes).unwrap();
            refused();
            assert_eq!(fs::read(place.file()).unwrap(), bytes);
        }
        fs::remove_file(place.file()).unwrap();
        let elsewhere = place.around.path().join("elsewhere");
        fs::write(&elsewhere, [7; SECRET_BYTES]).unwrap();
        fs::set_permissions(&elsewhere, Permissions::from_mode(0o600)).unwrap();
        symlink(&elsewhere, place.file()).unwrap();
        refused();
    }

    #[test]
    fn who_proves_what_to_whom() {
        let place = Place::new();
        let user = || Proofs::new("", &place.folder).unwrap();
        fs::write(place.around.path().join("file"), "").unwrap();
        let nowhere = RuntimeFolder::at(place.around.path().join("file"));
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
