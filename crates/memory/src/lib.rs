//! kvlane memory
