//! kvlane server
