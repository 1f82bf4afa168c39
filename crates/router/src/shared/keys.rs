//! Clients' keys, which may change while the router runs.

use std::{fmt, sync::Arc};

use parking_lot::{RwLock, RwLockReadGuard};

/// The keys that clients may show. Clones share them.
#[derive(Clone, Default)]
pub struct Keys(Arc<RwLock<Vec<String>>>);

impl Keys {
    /// Replaces the keys at once.
    pub fn replace(&self, keys: Vec<String>) {
        *self.0.write() = keys;
    }

    /// Without keys the router serves everybody.
    pub fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }

    /// All keys. Never hold the guard across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, Vec<String>> {
        self.0.read()
    }
}

impl From<Vec<String>> for Keys {
    fn from(keys: Vec<String>) -> Self {
        Self(Arc::new(RwLock::new(keys)))
    }
}

/// Logs show the number of keys, and no key.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.read().len())
    }
}
