//! kvlane client
