//! The keys that clients show. They may change while the router runs.

use std::{fmt, sync::Arc};

use parking_lot::{RwLock, RwLockReadGuard};

/// A list of keys. Clones share it.
#[derive(Clone, Default)]
pub struct Keys(Arc<RwLock<Vec<String>>>);

impl Keys {
    /// Replaces all keys, for all clones.
    pub fn replace(&self, keys: Vec<String>) {
        *self.0.write() = keys;
    }

    /// If so, the router serves every client.
    pub fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }

    /// Never hold the guard across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, Vec<String>> {
        self.0.read()
    }
}

impl From<Vec<String>> for Keys {
    fn from(keys: Vec<String>) -> Self {
        Self(Arc::new(RwLock::new(keys)))
    }
}

/// Shows the number of keys only, so that no log has a key.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.read().len())
    }
}
