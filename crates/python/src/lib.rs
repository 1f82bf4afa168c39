//! kvlane python
