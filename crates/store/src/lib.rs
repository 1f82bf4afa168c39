//! kvlane store
