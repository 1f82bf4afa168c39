//! [`RuntimeFolder`]: the folder in which the daemon, the engines and the tools of one user find each other.
//!
//! Processes trust its contents: the daemon's socket, and the secret of the fabric. So the folder must be this user's
//! alone. Every opening checks that, because `/tmp` is open to all and another user may have made `/tmp/kvlane-UID`
//! first.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{env, fmt, io};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use thiserror::Error;

use crate::users::{own_user_is_unclear, unknown_user};

/// The folder where daemon, engines and tools of one user meet, unless an option names another address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeFolder(PathBuf);

/// Why the runtime folder is not used. Its text also says what to do.
#[derive(Debug, Error)]
#[error(
    "{} is not used: {why}. {}, set XDG_RUNTIME_DIR to a folder of your own, or name a socket elsewhere \
     (`kvlane serve --listen unix:PATH`; KVLANE_ADDR for engines and tools)",
    path.display(), why.remedy(path)
)]
pub struct FolderRefused {
    /// Path of the folder, whether or not it exists.
    pub path: PathBuf,
    /// The check that failed.
    pub why: FolderFault,
}

/// The fault of a runtime folder.
#[derive(Debug)]
pub enum FolderFault {
    /// The folder does not exist yet.
    Missing,
    /// The path is a symbolic link, whose maker would decide which folder is used.
    Link,
    /// The path is neither a folder nor a link.
    NoFolder,
    /// The folder belongs to another user, or may belong to one.
    Owner {
        /// User id of the folder's owner.
        owner: u32,
        /// Effective user id of this process.
        own: u32,
    },
    /// Other users may enter the folder. Holds its permission bits.
    Mode(u32),
    /// Other users may replace the folder, because the folder around it is theirs, or lets everybody write.
    Around {
        /// The folder around it.
        folder: PathBuf,
        /// User id of that folder's owner.
        owner: u32,
        /// That folder's permission bits, as chmod takes them.
        mode: u32,
    },
    /// The kernel does not let this process open or make the folder.
    Io(io::Error),
}

impl fmt::Display for FolderFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "it does not exist"),
            Self::Link => write!(f, "it is a symbolic link, which somebody else may have made"),
            Self::NoFolder => write!(f, "it is no folder"),
            Self::Owner { owner, own } if owner == own => write!(
                f,
                "in this user namespace every user without a number looks like user {own}, who runs this process, so that \
                 it may be anybody's: run it as another user"
            ),
            Self::Owner { owner, own } => {
                write!(f, "it belongs to user {owner}, and this process to user {own}")
            }
            Self::Mode(mode) => write!(f, "its mode is {mode:03o}, so others than its owner may enter it"),
            Self::Around { folder, owner, mode } => write!(
                f,
                "{} around it belongs to user {owner} and has mode {mode:04o}, so others may put another folder in its \
                 place",
                folder.display()
            ),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl FolderFault {
    /// The remedy for the user, as the beginning of a sentence.
    fn remedy(&self, path: &Path) -> String {
        match self {
            Self::Missing => "Start the daemon, which makes it".into(),
            Self::Mode(_) => format!("Run `chmod 700 {}` if nothing in it is a stranger's", path.display()),
            Self::Around { folder, .. } => format!("Protect {}", folder.display()),
            Self::Link | Self::NoFolder | Self::Owner { .. } | Self::Io(_) => "Remove it".into(),
        }
    }
}

impl RuntimeFolder {
    /// The folder of the user who runs this process: `kvlane` in `$XDG_RUNTIME_DIR`, or `/tmp/kvlane-UID` if the
    /// session has none.
    pub fn of_this_user() -> RuntimeFolder {
        RuntimeFolder::in_session(env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from))
    }

    /// Ignores a relative path, as the XDG Base Directory Specification demands: two processes with different working
    /// directories would use two folders.
    fn in_session(session: Option<PathBuf>) -> RuntimeFolder {
        let is_one = |folder: &PathBuf| folder.is_absolute() && folder.is_dir();
        RuntimeFolder(match session.filter(is_one) {
            Some(folder) => folder.join("kvlane"),
            None => PathBuf::from(format!("/tmp/kvlane-{}", own_user())),
        })
    }

    /// The folder at another path, for tests.
    pub fn at(path: impl Into<PathBuf>) -> RuntimeFolder {
        RuntimeFolder(path.into())
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether this path is directly in the folder, not in a folder below.
    pub fn holds(&self, path: &Path) -> bool {
        path.parent() == Some(&self.0)
    }

    /// Opens the folder for paths relative to it, if it is this user's alone. It must be a folder and no link, belong
    /// to this user and have mode 0700. Only this user and root may be able to replace it.
    pub fn open(&self) -> Result<OwnedFd, FolderRefused> {
        self.try_open().map_err(|why| FolderRefused { path: self.0.clone(), why })
    }

    /// Makes the folder if it is missing, and opens it.
    pub fn make(&self) -> Result<OwnedFd, FolderRefused> {
        match rustix::fs::mkdir(&self.0, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => self.open(),
            Err(errno) => Err(FolderRefused { path: self.0.clone(), why: FolderFault::Io(errno.into()) }),
        }
    }

    fn try_open(&self) -> Result<OwnedFd, FolderFault> {
        if let Some(folder) = self.0.parent() {
            check_around(folder)?;
        }
        // PATH opens a link itself, and needs no permission to see the owner.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, &self.0, flags, Mode::empty()).map_err(fault)?;
        let found = rustix::fs::fstat(&folder).map_err(fault)?;
        let own = own_user();
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Symlink => Err(FolderFault::Link),
            FileType::Directory if found.st_uid != own || own_user_is_unclear() => {
                Err(FolderFault::Owner { owner: found.st_uid, own })
            }
            FileType::Directory if found.st_mode & 0o077 != 0 => Err(FolderFault::Mode(permissions(&found))),
            FileType::Directory => Ok(folder),
            _ => Err(FolderFault::NoFolder),
        }
    }
}

/// Checks that only this user and root can rename entries of a folder. The folder must be theirs. Others may not write
/// there, unless it is sticky, so that they can change only their own entries.
fn check_around(folder: &Path) -> Result<(), FolderFault> {
    const STICKY: u32 = 0o1000;
    let found = rustix::fs::stat(folder).map_err(fault)?;
    let mode = permissions(&found);
    // If root of the host has no id in this user namespace, /tmp seems to belong to the unknown user.
    let owners = [own_user(), 0, unknown_user()];
    let is_theirs = owners.contains(&found.st_uid) && (mode & 0o022 == 0 || mode & STICKY != 0);
    let fault = || FolderFault::Around { folder: folder.to_owned(), owner: found.st_uid, mode };
    is_theirs.then_some(()).ok_or_else(fault)
}

fn permissions(found: &Stat) -> u32 {
    found.st_mode & 0o7777
}

fn fault(errno: Errno) -> FolderFault {
    match errno {
        Errno::NOENT => FolderFault::Missing,
        errno => FolderFault::Io(errno.into()),
    }
}

/// Effective user id of this process.
fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn refusal(folder: &RuntimeFolder) -> FolderFault {
        let refused = folder.open().unwrap_err();
        assert!(refused.to_string().contains(&refused.path.display().to_string()), "{refused}");
        refused.why
    }

    /// A relative XDG_RUNTIME_DIR named another folder in each working directory: daemon and engines did not meet.
    #[test]
    fn a_session_folder_counts_only_if_its_path_is_absolute() {
        let place = |session: Option<&str>| RuntimeFolder::in_session(session.map(PathBuf::from)).0;
        let own = PathBuf::from(format!("/tmp/kvlane-{}", own_user()));
        assert_eq!(place(Some("/")), PathBuf::from("/kvlane"));
        for session in [None, Some(""), Some("."), Some("src"), Some("/no/such/folder")] {
            assert_eq!(place(session), own, "{session:?}");
        }
    }

    #[test]
    fn a_folder_is_made_for_its_user_alone_and_found_again() {
        let around = tempfile::tempdir().unwrap();
        let folder = RuntimeFolder::at(around.path().join("kvlane"));
        assert!(matches!(refusal(&folder), FolderFault::Missing));
        folder.make().unwrap();
        assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o7777, 0o700);
        folder.make().unwrap();
        folder.open().unwrap();
        assert!(folder.holds(&folder.path().join("kvlane.sock")));
        assert!(!folder.holds(folder.path()));
        assert!(!folder.holds(&folder.path().join("deeper/kvlane.sock")));
    }

    #[test]
    fn a_link_a_file_and_open_permissions_are_refused_and_left_alone() {
        let around = tempfile::tempdir().unwrap();
        let real = RuntimeFolder::at(around.path().join("real"));
        real.make().unwrap();
        let link = RuntimeFolder::at(around.path().join("link"));
        symlink(real.path(), link.path()).unwrap();
        assert!(matches!(refusal(&link), FolderFault::Link));
        assert!(matches!(link.make().unwrap_err().why, FolderFault::Link));
        let file = RuntimeFolder::at(around.path().join("file"));
        fs::write(file.path(), "data").unwrap();
        assert!(matches!(file.make().unwrap_err().why, FolderFault::NoFolder));
        for mode in [0o701, 0o710, 0o704, 0o770, 0o777, 0o1777] {
            fs::set_permissions(real.path(), Permissions::from_mode(mode)).unwrap();
            let refused = real.make().unwrap_err();
            assert!(matches!(refused.why, FolderFault::Mode(found) if found == mode), "{refused}");
            assert!(refused.to_string().contains("chmod 700"), "{refused}");
            assert_eq!(fs::metadata(real.path()).unwrap().permissions().mode() & 0o7777, mode);
        }
    }

    /// Else whoever may write there renames the folder after it was looked at, and puts one of theirs in its place.
    #[test]
    fn a_folder_that_others_can_replace_is_refused() {
        let around = tempfile::tempdir().unwrap();
        let folder = RuntimeFolder::at(around.path().join("kvlane"));
        folder.make().unwrap();
        for (mode, is_right) in [(0o777, false), (0o770, false), (0o1777, true), (0o755, true)] {
            fs::set_permissions(around.path(), Permissions::from_mode(mode)).unwrap();
            let opened = folder.open();
            assert_eq!(opened.is_ok(), is_right, "{mode:o}: {opened:?}");
            if let Err(refused) = opened {
                assert!(matches!(refused.why, FolderFault::Around { .. }), "{refused}");
            }
        }
    }
}
