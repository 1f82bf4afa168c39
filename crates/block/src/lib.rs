//! kvlane block
