//! kvlane policy
