//! kvlane proto
